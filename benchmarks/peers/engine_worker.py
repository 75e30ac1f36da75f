"""Another engine as a process that answers lines of JSON: `python engine_worker.py ENGINE MODEL THREADS DTYPE DEVICE`.

ENGINE is openvino, llama_cpp, vllm, sglang or transformers; DTYPE, float32 or bfloat16, is what these can be told;
DEVICE is cpu, or for the last three cuda. It runs in the Python of the peer's environment and imports nothing of
Moonpool. The first line that it prints is `{"ready": VERSION}`. Then each line `{"prompts": [[ID, ...], ...], "tokens":
N}`, prompts of one length, is answered by `{"seconds": S, "token_ids": [[ID, ...], ...]}`: greedy answers of exactly N
tokens each, computed together.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]
Answer = Callable[[Prompts, int], list[list[int]]]
LONGEST = 4096
MOST = 64


def openvino(model: str, threads: int, dtype: str, device: str) -> tuple[str, Answer]:
    """OpenVINO GenAI on a GGUF file, in its own choice of precision unless float32 is wanted."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    precision = {"INFERENCE_PRECISION_HINT": "f32"} if dtype == "float32" else {}
    pipe = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, ATTENTION_BACKEND="SDPA", **precision)

    def answer(prompts: Prompts, tokens: int) -> list[list[int]]:
        ids = np.array(prompts, dtype=np.int64)
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return [list(row) for row in pipe.generate(inputs, config).tokens]

    return f"openvino-genai {genai.__version__}", answer


def llama_cpp(model: str, threads: int, dtype: str, device: str) -> tuple[str, Answer]:
    """llama.cpp on a GGUF file, as precise as that is: one batch of all sequences a step, and numpy's argmax."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.use_mmap = True
    loaded = lib.llama_model_load_from_file(model.encode(), params)
    if not loaded:
        raise RuntimeError(f"llama.cpp cannot load {model}")
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = LONGEST * 2, MOST
    settings.n_batch, settings.n_ubatch = LONGEST, 512
    settings.n_threads = settings.n_threads_batch = threads
    settings.kv_unified, settings.no_perf = True, True
    context = lib.llama_init_from_model(loaded, settings)
    batch = lib.llama_batch_init(LONGEST * 2, 0, 1)

    def add(token: int, position: int, sequence: int, *, last: bool) -> None:
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, last
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens += 1

    def step() -> list[int]:
        rows = [at for at in range(batch.n_tokens) if batch.logits[at]]
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama.cpp has no room for the batch")
        found = [lib.llama_get_logits_ith(context, row) for row in rows]
        batch.n_tokens = 0
        return [int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax()) for logits in found]

    def answer(prompts: Prompts, tokens: int) -> list[list[int]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        made: list[list[int]] = [[] for _ in prompts]
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                add(token, position, sequence, last=position == len(prompt) - 1)
            made[sequence] += step()
        while len(made[0]) < tokens:
            for sequence, prompt in enumerate(prompts):
                add(made[sequence][-1], len(prompt) + len(made[sequence]) - 1, sequence, last=True)
            for row, token in zip(made, step(), strict=True):
                row.append(token)
        return made

    return f"llama-cpp-python {lib.__version__}", answer


def vllm(model: str, threads: int, dtype: str, device: str) -> tuple[str, Answer]:
    """The engine of vLLM on a folder, in this process; prompts are computed anew each time."""
    import os

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    import vllm as lib

    steps = {"max_num_batched_tokens": LONGEST} if device == "cpu" else {}  # for a GPU vLLM knows better
    loaded = lib.LLM(
        model, dtype=dtype, max_model_len=LONGEST, max_num_seqs=MOST,
        enable_prefix_caching=False, skip_tokenizer_init=True, **steps,
    )  # fmt: skip

    def answer(prompts: Prompts, tokens: int) -> list[list[int]]:
        sampling = lib.SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [lib.TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in loaded.generate(asked, sampling, use_tqdm=False)]

    return f"vLLM {lib.__version__}", answer


def sglang(model: str, threads: int, dtype: str, device: str) -> tuple[str, Answer]:
    """The engine of SGLang on a folder; prompts are computed anew each time."""
    import sglang as lib

    loaded = lib.Engine(
        model_path=model, dtype=dtype, device=device, context_length=LONGEST, max_running_requests=MOST,
        disable_radix_cache=True, skip_tokenizer_init=True,
    )  # fmt: skip

    def answer(prompts: Prompts, tokens: int) -> list[list[int]]:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        outs = loaded.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=sampling)
        return [list(out["output_ids"]) for out in outs]

    return f"SGLang {lib.__version__}", answer


def transformers(model: str, threads: int, dtype: str, device: str) -> tuple[str, Answer]:
    """Hugging Face transformers on a folder, or a GGUF file."""
    import torch
    import transformers as lib

    torch.set_num_threads(threads)
    folder, _, file = model.rpartition("/") if model.endswith(".gguf") else (model, "", "")
    which = {"gguf_file": file} if file else {}
    loaded: Any = lib.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **which)
    loaded.eval().to(device)

    def answer(prompts: Prompts, tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        flags = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            out = loaded.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **flags)
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    return f"transformers {lib.__version__}", answer


ENGINES = {"openvino": openvino, "llama_cpp": llama_cpp, "vllm": vllm, "sglang": sglang, "transformers": transformers}


def main(name: str, model: str, threads: str, dtype: str, device: str) -> None:
    """Answer until its input ends."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():  # else vLLM for CPUs would compute there
            sys.exit("torch can use no GPU")
    version, answer = ENGINES[name](model, int(threads), dtype, device)
    print(json.dumps({"ready": version}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.perf_counter()
        made = answer(asked["prompts"], asked["tokens"])
        print(json.dumps({"seconds": time.perf_counter() - begin, "token_ids": made}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
