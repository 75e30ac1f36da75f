"""lm-eval's model for local completions: log likelihoods and generation, with the server's tokenizer."""

from cells import MODEL, OPENAI_URL, cell, check, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

GIVEN = {"model": MODEL, "base_url": f"{OPENAI_URL}/completions", "tokenizer_backend": "remote", "max_length": 2048}


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@cell
def loglikelihood():
    model = LocalCompletionsAPI(**GIVEN, batch_size=2)
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " seventeen")]
    likely, unlikely = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    check(likely[0] > unlikely[0], (likely, unlikely))


@cell
def generate_until():
    model = LocalCompletionsAPI(**GIVEN, batch_size=1)
    settings = {"until": ["."], "max_gen_toks": 8, "temperature": 0}
    (text,) = model.generate_until([request("generate_until", "The capital of France is", settings)])
    check("Paris" in text, text)


run()
