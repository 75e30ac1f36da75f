"""What only a GPU can show. Run by test_gpu.py."""

import pytest
import torch

from moonpool.engine.kernels.triton import ops
from tests.unit.engine.kernels.test_triton.pools import make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_contexts(dtype: torch.dtype, deterministic: bool) -> None:
    case = make([(1, 4000), (300, 2500), (1, 64), (20, 3000)], dtype=dtype, head_dim=128, block_size=64)
    case.check(case.prefill(deterministic=deterministic))
    case = make([(1, 6000), (1, 1), (1, 777)], dtype=dtype, head_dim=128, block_size=64)
    case.check(case.decode(deterministic=deterministic))


def test_decode_and_prefill_agree_to_the_bit_when_deterministic() -> None:
    case = make([(200, 2500)], dtype=torch.bfloat16, head_dim=128, block_size=64)
    whole = case.prefill(deterministic=True)
    for row in (0, 57, 199):
        out = torch.full_like(case.q[:1], torch.nan)
        lengths = case.lengths - (199 - row)
        ops.decode_attention(
            case.q[row : row + 1], case.kv, None, case.tables, lengths, case.scale, out, deterministic=True
        )
        assert torch.equal(out[0], whole[row])


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_vectors_of_deepseek(heads: int) -> None:
    """With 128 heads, on Hopper by tiles of 64 rows: in one part, in several, and of a prompt."""
    sizes = {"kv_heads": 1, "group": heads, "head_dim": 576, "rest": 64, "block_size": 64, "dtype": torch.bfloat16}
    for sequences in ([(1, 200), (1, 64)], [(1, 5000), (1, 700), (1, 1)], [(90, 700), (1, 300), (33, 33)]):
        case = make(sequences, **sizes)  # type: ignore[arg-type]
        case.check(case.prefill())


def test_a_graph_is_replayed_with_other_contents() -> None:
    case = make([(1, 700), (1, 90)], dtype=torch.bfloat16, head_dim=128, block_size=64)
    out = torch.full_like(case.q, torch.nan)
    arguments = (case.q, case.kv, None, case.tables, case.lengths, case.scale, out)
    ops.decode_attention(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.decode_attention(*arguments)
    for lengths in ([700, 90], [650, 3], [0, 64]):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        if lengths[0]:
            case.check(out)
        else:
            assert not out[0].any()
