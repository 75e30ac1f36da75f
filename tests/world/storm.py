"""A storm: clients that use everything, and faults by a seed, on virtual time: `python -m tests.world.storm --seed 7`.

Clients of several tenants ask through the SDK and a gateway, with every feature (`tests/world/asks.py`), and use the
kvstores. Faults hit processes, engines, links, disks, clocks and memory (`tests/world/faults.py`). Afterwards:

- each answer is the plain model's, and follows its format; nobody is late but by its own deadline;
- no request fails but while the faults explain it (`tests/faults/disturbances.py`);
- what clients of the stores saw is what a store may do (`tests/world/history.py`); no tenant meets another's KV;
- nothing is held, every service runs, and all features work again; the cores' journals rerun to the same actions.

Prints a line of JSON for each storm, and then how often each path was met (`tests/world/marks.py`). What a storm
does and what the services meet both follow from the seed, so a failure comes again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, NotFound, Overloaded, Unavailable
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.rpc.api_keys import hash_key
from moonpool.base.rpc.tuning import tune_gc
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.transport import fault_injection
from moonpool.client import AsyncClient, Picture, SamplingParams
from tests.pictures import add_weights, picture_file, picture_model
from tests.world.asks import (
    BATCHES,
    FEATURES,
    FLOODING,
    OF,
    SCHEMA,
    TENANTS,
    TEXTS,
    Ask,
    Asks,
    Feature,
    Flood,
    Interface,
)
from tests.world.batches import Batch
from tests.world.clients import TIMEOUT_S, Answer, Outcome, ask_http, ask_sdk, is_sdk, use_stores
from tests.world.cluster import MODEL, STORE_PORT, Cluster, Service, Simulation
from tests.world.disk import Disk
from tests.world.faults import SKEW_S, FaultPlan, Faults
from tests.world.gateway import Gateway
from tests.world.history import Histories
from tests.world.judge import EmulatedJudge, Judge, wrong_format
from tests.world.marks import Marks
from tests.world.process import forked

MESSAGES = "MOONPOOL_STORM_MESSAGES"
"""Names the file for all messages."""
RATE = 4.0
"""Requests a second."""
HUNG_S = 200.0
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SDK_NEEDS = ("conductor", "prefill", "decode")
BLOCK = 16
CONTEXT = 200
"""Tokens of a context."""
BODY_MEMORY = "2MiB"
"""For all bodies at the gateway: a flood wants more."""
HOSTS: Mapping[bool, Mapping[str, int]] = {False: {"prefill-0": 1, "decode-0": 1}, True: {"decode-0": 1}}
"""Stages on hosts of their own; True: where decode instances compute the prompts."""
PICTURES = 4
"""Pictures that requests of a storm show."""
SHOWN = 8
"""Failures that are shown of a storm."""


@dataclass(frozen=True, slots=True)
class StormPlan:
    """One storm.

    Attributes:
        seed: of everything that is drawn.
        seconds: how long faults happen.
        computes: whether the checkpoint's own engine computes; else it is emulated.
        conductors: side by side.
        faults: how faults are drawn.
        corrupt: share of KV frames that are damaged.
        stages: of prefill's engines.
        durability: of the kvstores.
        rerun: whether journals are kept, rerun and read for marks.
        prompts_at_decode: plain decode instances may compute prompts; else more KV is moved.
        ranks: of each stage, if the checkpoint's own engine computes.
        pictures: the checkpoint has pictures, and requests show some.
        hosts: by instance, how many of its stages are on hosts of their own.
    """

    seed: int
    seconds: float = 15.0
    computes: bool = False
    conductors: int = 2
    faults: FaultPlan = field(default_factory=FaultPlan)
    corrupt: float = 0.0
    stages: int = 1
    durability: str = "process"
    rerun: bool = True
    prompts_at_decode: bool = True
    ranks: int = 1
    pictures: bool = False
    hosts: Mapping[str, int] = field(default_factory=dict)
    both: bool = False
    """No prefill instance: three decode instances compute the prompts."""

    @classmethod
    def drawn(cls, seed: int, seconds: float, *, rerun: bool = True) -> StormPlan:
        """The plan that a seed stands for."""
        drawn = random.Random(f"plan {seed}")
        return cls(
            seed,
            seconds,
            computes=seed % 2 == 0,
            conductors=drawn.choice((1, 2, 2)),
            faults=FaultPlan(drawn.choice((0.8, 1.5, 3.0))),
            corrupt=drawn.choice((0.0, 0.0, 0.02)),
            stages=drawn.choice((1, 2, 2)),
            durability=drawn.choice(("power", "process")),
            rerun=rerun,
            prompts_at_decode=drawn.random() < 0.3,
        )

    def flags(self) -> dict[str, list[str]]:
        """Flags of the services: pools and tiers are small, so that requests wait and blocks are evicted."""
        flags = self._flags()
        if not self.prompts_at_decode:
            flags["conductor"] = ["--set", "decode_prompt_tokens=0"]
        if self.both:
            flags["decode"] += ["--set", "computes_prompts=true"]
        return flags

    def _flags(self) -> dict[str, list[str]]:
        engine, stages = ["--block-size", str(BLOCK)], ["--pipeline-parallel-size", str(self.stages)]
        store = ["--ssd-bytes", "16MiB", "--durability", self.durability]
        if self.computes:
            pool = ["--set", "blocks=320"]
            ranks = ["--set", f"tensor_parallel_size={self.ranks}"]
            decode = [*engine, *pool, *ranks, "--speculative", "ngram", "--set", "preempt_every=60"]
            prefill = [*engine, *pool, *stages, *ranks, "--max-num-batched-tokens", "256"]
            return {"kvstore": [*store, "--dram-bytes", "2MiB"], "prefill": prefill, "decode": decode}
        return {
            "kvstore": [*store, "--dram-bytes", "1MiB"],
            "prefill": [*engine, *stages, "--max-num-batched-tokens", "1024"],
            "decode": [*engine, "--kv-cache-memory-bytes", "2MiB"],
        }


class Storm:
    """One storm; `run` gives what happened.

    Attributes:
        cluster: the services.
        story: faults and errors, a line each.
        bad: promises that were broken.
        marks: paths that were met.
    """

    def __init__(self, simulation: Simulation, plan: StormPlan, folder: Path, checkpoint: Path) -> None:
        """Take an empty folder for disks and journals."""
        self.plan, self._simulation, self._loop = plan, simulation, simulation.loop
        self._folder = folder
        self._model = checkpoint if plan.computes else Path(MODEL)
        self._judge = _judge(plan, checkpoint)
        self._tokenizer = Tokenizer.load(self._model)
        engines = {"prefill": 0, "decode": 3} if plan.both else {"prefill": 2, "decode": 2}
        counts = {"conductor": plan.conductors, "kvstore": 2, **engines}
        computed = checkpoint if plan.computes else None
        self.cluster = Cluster(simulation, counts, plan.flags(), checkpoint=computed, hosts=plan.hosts)
        drawn = random.Random(f"storm {plan.seed}")
        for service in self.cluster.services.values():
            service.skew_s = drawn.uniform(-SKEW_S, SKEW_S)
            if service.kind == "kvstore":
                service.disk = Disk(folder / service.name, f"{plan.seed} {service.name}")
            elif plan.rerun and not service.leader:
                service.journals = folder / "journals"
        self._batches = folder / "batches"
        self._drawn = drawn
        self._asks = Asks(plan.seed, plan.computes, drawn_pictures(plan.seed) if plan.pictures else ())
        self._keys = {tenant: f"key of {tenant}" for tenant in (*TENANTS, FLOODING)}
        self._outcomes: list[Outcome] = []
        self._work: list[asyncio.Task[Any]] = []
        self._histories = Histories()
        self._contexts: dict[str, tuple[str, list[int]]] = {}
        """Tenant and tokens of each context that ever was."""
        self._texts = _ids_of_texts(self._tokenizer)
        self._told: list[str] = []
        self._began = 0.0
        self.story: list[str] = []
        self.bad: list[str] = []
        self.marks = Marks()

    async def run(self) -> dict[str, Any]:
        await self.cluster.start()
        keys = self._folder / "keys"
        keys.write_text("".join(f"sha256:{hash_key(key)} {name}\n" for name, key in self._keys.items()))
        flags = ["--api-keys", str(keys), "--set", f"body_memory_bytes={BODY_MEMORY}"]
        flags += ["--set", f"batch_dir={self._batches}"]
        if self.plan.pictures:  # the template shows no form of calls
            flags += ["--tool-call-parser", "hermes"]
        self._gateway = Gateway(self._simulation, self.cluster.addresses, str(self._model), flags)
        fault_injection.corruptor = fault_injection.FrameCorruptor(self.plan.corrupt, self.plan.seed)
        async with AsyncClient(self.cluster.addresses, timeout_s=TIMEOUT_S) as client:
            self._client = client
            await self._make_contexts()
            self._began = self._loop.time()
            faults = Faults(self._simulation, self.cluster, self._gateway, self.plan.faults, self._flood)
            self._faults, self._told = faults, faults.told
            injection = self._loop.create_task(faults.run(self._now, self.plan.seconds))
            self._use_stores()
            await self._ask_things()
            await injection
            await self._end()
            fault_injection.corruptor = None
            log = self._simulation.log.digest  # some gauges of kvstores, which are asked next, tell the real memory
            await self._calm()
        self._judge_all()
        self.bad += self._histories.faults()
        if self.plan.rerun:
            await self.cluster.drain()
            self.bad += self.marks.read(self._folder / "journals")
        return self._result(log)

    @property
    def faults_told(self) -> list[str]:
        """A line for each fault."""
        return self._told

    def _result(self, log: str) -> dict[str, Any]:
        answers = [
            (outcome.ask.number, outcome.begin, outcome.ended, [answer.tokens for answer in outcome.answers])
            for outcome in self._outcomes
        ]
        digest = hashlib.sha256(repr(sorted(answers, key=lambda answer: answer[0])).encode()).hexdigest()[:16]
        up = self._faults.disturbances.up_share(0.0, self.plan.seconds, SDK_NEEDS)
        return {
            "seed": self.plan.seed,
            "engine": "computed" if self.plan.computes else "emulated",
            "requests": len(self._outcomes),
            "pictures": sum(len(each.ask.pictures) for each in self._outcomes if each.ended == "complete"),
            "outcomes": dict(Counter(outcome.ended for outcome in self._outcomes)),
            "operations": len(self._histories),
            "faults": dict(sorted(self._faults.counts.items())),
            "up": round(up, 3),
            "bad": [text[:400] for text in self.bad[:SHOWN]],
            "virtual_s": self._now(),
            "answers": digest,
            "log": log,
            "marks": self.marks.counts,
        }

    def _now(self) -> float:
        """Seconds of the storm."""
        return round(self._loop.time() - self._began, 6)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._work.append(self._loop.create_task(coroutine))

    # --- what clients do --------------------------------------------------------------------------------------------

    async def _make_contexts(self) -> None:
        for tenant in TENANTS:
            tokens = self._asks.document(tenant, 1)[:CONTEXT]
            made = await self._client.contexts.create(token_ids=tokens, tenant=tenant)
            self._asks.contexts[tenant] = made.id
            self._contexts[made.id] = tenant, tokens

    def _use_stores(self) -> None:
        names = [name for name, service in self.cluster.services.items() if service.kind == "kvstore"]
        addresses = {name: self.cluster.services[name].address for name in names}
        assert all(address.endswith(f":{STORE_PORT}") for address in addresses.values())
        for tenant in TENANTS[:2]:
            self._spawn(use_stores(addresses, tenant, self.plan.seed, self._histories, self._now, self.plan.seconds))

    async def _ask_things(self) -> None:
        while True:
            await asyncio.sleep(self._drawn.expovariate(RATE))
            if self._now() >= self.plan.seconds:
                return
            draw = self._drawn.random()
            if draw < 0.06:
                self._spawn(self._converse(f"s{len(self._work)}"))
            elif draw < 0.08:
                self._spawn(self._delete(f"gone{len(self._work)}"))
            elif draw < 0.1:
                self._spawn(self._use_new_context(self._drawn.choice(TENANTS)))
            elif draw < 0.13:
                self._spawn(self._run_batch(self._drawn.choice(TENANTS)))
            else:
                self._spawn(self._ask(self._asks.next()))

    async def _ask(self, ask: Ask) -> Outcome:
        outcome = Outcome(ask, self._now(), place=len(self._outcomes))
        self._outcomes.append(outcome)
        if is_sdk(ask):
            work: Coroutine[Any, Any, None] = ask_sdk(self._client, ask, outcome, self._now)
        else:
            work = ask_http(self._gateway, ask, outcome, self._keys[ask.tenant])
        await work
        outcome.end = self._now()
        if outcome.error:
            self.story.append(f"{outcome.end:.6f} {ask}: {outcome.error[:300]}")
        return outcome

    async def _flood(self, kind: Flood) -> None:
        await asyncio.gather(*(self._ask(ask) for ask in self._asks.flood(kind)))

    async def _converse(self, name: str) -> None:
        """A session of three turns: each begins with all of the one before."""
        ask = replace(self._asks.next(), interface="stream", feature="greedy", chat=(), slo=None, context="")
        tokens = ask.tokens or tuple(self._asks.document(ask.tenant, 2)[:50])
        for turn in range(3):
            session = SessionTurn(id=name, return_s=1.0, last=turn == 2)
            how = replace(GREEDY, max_tokens=20)
            now = replace(ask, tokens=tokens, how=how, session=session, ending="stay", number=-1)
            outcome = await self._ask(now)
            if outcome.ended != "complete":
                return
            if turn and outcome.cached and outcome.cached >= len(tokens) - 2 * BLOCK:
                self.marks.meet("a turn finds the turn before")
            new = [self._drawn.randrange(8, 250) for _ in range(self._drawn.randrange(1, 30))]
            tokens = (*tokens, *outcome.answers[0].tokens, *new)
            await asyncio.sleep(self._drawn.expovariate(1.0))

    async def _delete(self, tenant: str) -> None:
        """KV of a tenant that was deleted everywhere is not met again."""
        tokens = tuple(self._drawn.randrange(8, 250) for _ in range(6 * BLOCK + 3))
        ask = Ask(-1, tenant, "generate", "greedy", GREEDY, tokens)
        await self._ask(ask)
        await asyncio.sleep(self._drawn.uniform(0.0, 2.0))
        try:
            deleted = await self._client.delete_kv(tenants=[tenant], timeout_s=30.0)
        except MoonpoolError as error:
            self.story.append(f"{self._now():.6f} deletion of {tenant}: {error}")
            return
        outcome = await self._ask(ask)
        done = {instance.instance for instance in deleted.instances if not instance.error}
        everywhere = done.issuperset(
            service.name for service in self.cluster.services.values() if service.kind not in ("conductor", "stage")
        )
        if everywhere and outcome.cached:
            self.bad.append(f"{tenant} was deleted everywhere, and {outcome.cached} tokens are cached")

    async def _use_new_context(self, tenant: str) -> None:
        """A new context serves requests until it is deleted; then it is unknown."""
        tokens = [self._drawn.randrange(8, 250) for _ in range(self._drawn.randrange(BLOCK, CONTEXT))]
        own = tuple(self._drawn.randrange(8, 250) for _ in range(20))
        try:
            made = await self._client.contexts.create(token_ids=tokens, tenant=tenant)
            self._contexts[made.id] = tenant, tokens
            ask = Ask(-1, tenant, "stream", "greedy", GREEDY, own, context=made.id)
            await self._ask(ask)
            await asyncio.sleep(self._drawn.uniform(0.0, 2.0))
            await self._ask(ask)
            await self._client.contexts.delete(made.id, tenant=tenant, timeout_s=30.0)
        except MoonpoolError as error:
            self.story.append(f"{self._now():.6f} a context of {tenant}: {error}")
            if not isinstance(error, (Unavailable, Overloaded, DeadlineExceeded)):
                self.bad.append(f"a context of {tenant}: {error!r}")
            return
        try:
            await self._client.contexts.get(made.id, tenant=tenant)
            self.bad.append(f"context {made.id} of {tenant} was deleted, and is there")
        except NotFound:
            self.marks.meet("a deleted context is unknown")
        except (Unavailable, Overloaded, DeadlineExceeded) as error:
            self.story.append(f"{self._now():.6f} a deleted context of {tenant}: {error}")

    async def _run_batch(self, tenant: str) -> None:
        """Each line of a batch is answered once, whatever happens to the gateway."""
        asks = self._asks.batch(tenant, self._drawn.choice(BATCHES))
        outcomes = [Outcome(ask, self._now(), place=len(self._outcomes) + place) for place, ask in enumerate(asks)]
        self._outcomes += outcomes
        batch = Batch(self._gateway, self._batches / "files", self._keys[tenant])
        await batch.run(outcomes, self._now)
        if batch.fault:
            self.bad.append(f"a batch of {tenant} from {outcomes[0].begin:.3f} s: {batch.fault}")
        else:
            self.marks.meet("a batch is complete")
        if batch.lives:
            self.marks.meet("a batch goes on in another life of the gateway")

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Wait for all clients; none may hang."""
        hung = (await asyncio.wait(self._work, timeout=HUNG_S))[1]
        if hung:
            self.bad.append(f"{len(hung)} clients hang")
        for task in self._work:
            if task.done() and task.exception() is not None:
                self.bad.append(f"a client: {task.exception()!r}")

    async def _calm(self) -> None:
        """All run, nothing is held, and every feature works over every interface."""
        services: list[Service | Gateway] = [*self.cluster.services.values(), self._gateway]
        for service in services:
            if service.task.done():
                self.bad.append(f"{service.node} has ended: {service.task.exception()!r}")
                return
        try:
            await self.cluster.rest()
        except AssertionError as error:
            self.bad.append(str(error))
        batch = asyncio.create_task(self._run_batch(TENANTS[0]))
        outcomes = await asyncio.gather(*(self._ask(ask) for ask in self._each()))
        await batch
        for outcome in outcomes:
            if outcome.ended != "complete":
                self.bad.append(f"in the calm: {outcome.ask}: {outcome.ended} {outcome.error}")
        try:
            await self.cluster.rest()
        except AssertionError as error:
            self.bad.append(str(error))
        await self._gateway.close()

    def _each(self) -> Iterator[Ask]:
        """A request for each feature that the engine has, over some interface."""
        wanted: list[Feature] = [
            each for each in FEATURES if self.plan.computes or each in ("greedy", "drawn", "several")
        ]
        interfaces: set[Interface] = set(OF)
        while wanted or interfaces:
            ask = self._asks.next()
            if ask.feature in wanted or ask.interface in interfaces:
                wanted = [each for each in wanted if each != ask.feature]
                interfaces.discard(ask.interface)
                yield replace(ask, ending="stay", slo=None)

    # --- the judgement ----------------------------------------------------------------------------------------------

    def _judge_all(self) -> None:
        for outcome in self._outcomes:
            for fault in self._faults_of(outcome):
                self.bad.append(f"{outcome.ask}: {fault}")
            needs = SDK_NEEDS if is_sdk(outcome.ask) else (*SDK_NEEDS, "gateway")
            why = self._faults.disturbances.explain(outcome.begin, outcome.end, needs)
            if outcome.ended in ("failed", "refused") and outcome.ask.tenant != FLOODING and not why:
                span = f"{outcome.begin:.3f} to {outcome.end:.3f} s"
                self.bad.append(f"{outcome.ask} {outcome.ended} for no fault, {span}: {outcome.error}")
            self.marks.see(outcome, bool(why))
        self.bad += self._foreign()
        for operation in self._histories.operations():
            if operation.kind == "delete" and operation.changed:
                self.marks.meet("a store's value is deleted")
            elif operation.kind == "get" and operation.value:
                self.marks.meet("a store's value is read")

    def _faults_of(self, outcome: Outcome) -> Iterator[str]:
        """What is wrong with an outcome, whatever the faults."""
        ask, judge = outcome.ask, self._judge
        if outcome.unexpected:
            yield outcome.unexpected
        limit = ask.limit if ask.ending == "deadline" else TIMEOUT_S
        if outcome.end - outcome.begin > limit + 1.0:
            yield f"took {outcome.end - outcome.begin:.1f} s"
        if outcome.ended == "late" and ask.ending != "deadline":
            yield "was late"
        if ask.feature == "tools":
            yield from self._tool_faults(outcome)
            return
        if not outcome.answers:
            return
        prompt = self._prompt(ask)
        if outcome.prompt and outcome.prompt != prompt:
            yield "has another prompt"
        whole = outcome.ended == "complete"
        if whole and len(outcome.answers) != ask.how.n:
            yield f"has {len(outcome.answers)} answers"
        if ask.interface in TEXTS:
            yield from self._text_faults(outcome, prompt)
            return
        for index, answer in enumerate(outcome.answers):
            if ask.feature == "beams":
                if whole and (fault := judge.wrong_score(prompt, answer.tokens, answer.score or 0.0)):
                    yield fault
                continue
            if fault := judge.wrong(prompt, answer.tokens, ask.how, index):
                yield f"answer {index}: {fault}"
            if whole and ask.how.ignore_eos and len(answer.tokens) != ask.how.max_tokens:
                yield f"answer {index} has {len(answer.tokens)} of {ask.how.max_tokens} tokens"
            if whole and answer.finish == "stop" and (fault := wrong_format(ask.how, answer.text)):
                yield f"answer {index}: {fault}"
            if answer.logprobs and (fault := judge.wrong_logprobs(prompt, answer.logprobs)):
                yield f"answer {index}: {fault}"
            if answer.told:
                yield from self._told_faults(ask, prompt, answer)
            elif whole and ask.how.logprobs is not None and len(answer.logprobs) != len(answer.tokens):
                yield f"answer {index} has {len(answer.logprobs)} log probabilities of {len(answer.tokens)} tokens"
        if outcome.scored and (fault := judge.wrong_logprobs(prompt[:1], outcome.scored)):
            yield f"the prompt: {fault}"
        if outcome.told_scores:
            yield from self._score_faults(prompt, outcome.told_scores)

    def _told_faults(self, ask: Ask, prompt: list[int], answer: Answer) -> Iterator[str]:
        """Of log probabilities that came over HTTP: they name tokens by texts, which several tokens may have."""
        if len(answer.told) != len(answer.tokens):
            yield f"{len(answer.told)} log probabilities of {len(answer.tokens)} tokens"
            return
        found = list[TokenLogprobs]()
        for token, (text, logprob, top) in zip(answer.tokens, answer.told, strict=True):
            if token not in self._texts[text]:
                yield f"log probabilities of {text!r} for token {token}"
            known = tuple((self._texts[each][0], value) for each, value in top.items() if len(self._texts[each]) == 1)
            found.append(TokenLogprobs(token, logprob, 0, known))
            if not known and ask.how.logprobs and all(len(self._texts[each]) == 1 for each in top):
                yield f"no most likely tokens beside {text!r}"
        if fault := self._judge.wrong_logprobs(prompt, found):
            yield fault

    def _score_faults(self, prompt: list[int], told: Sequence[Mapping[int, float] | None]) -> Iterator[str]:
        """Of a prompt's log probabilities that came over HTTP."""
        if len(told) != len(prompt) or told[0] is not None:
            yield f"{len(told)} log probabilities of a prompt of {len(prompt)} tokens"
            return
        scores = [
            TokenLogprobs(token, each[token], 0, tuple(each.items()))
            for token, each in zip(prompt[1:], told[1:], strict=True)
            if each is not None
        ]
        if fault := self._judge.wrong_logprobs(prompt[:1], scores):
            yield f"the prompt: {fault}"

    def _tool_faults(self, outcome: Outcome) -> Iterator[str]:
        if outcome.ended != "complete" or any(answer.finish in ("length", "max_tokens") for answer in outcome.answers):
            return
        if not outcome.arguments:
            yield "no tool is called"
        for given in outcome.arguments:
            try:
                jsonschema.validate(json.loads(given) if isinstance(given, str) else given, SCHEMA)
            except (ValueError, jsonschema.ValidationError) as error:
                yield f"a tool's arguments {given!r}: {error}"

    def _text_faults(self, outcome: Outcome, prompt: list[int]) -> Iterator[str]:
        """Of an interface that tells no tokens."""
        ask, [value] = outcome.ask, outcome.answers
        if ask.feature == "schema":
            if value.finish in ("stop", "end_turn") and (fault := wrong_format(ask.how, value.text)):
                yield fault
            return
        right = self._judge.greedy(prompt, ask.how.max_tokens)
        if right is None:
            return
        stream = self._tokenizer.stream(prompt)
        text = stream.push(right) + stream.flush()
        if (outcome.ended == "complete" and value.text != text) or not text.startswith(value.text):
            yield f"{value.text!r} is not {text!r}"

    def _prompt(self, ask: Ask) -> list[int]:
        if ask.pictures:
            return self._judge.picture_prompt(ask.chat)
        if ask.chat:
            return self._tokenizer.apply_chat_template(ask.chat)
        context = self._contexts[ask.context][1] if ask.context else []
        return [*context, *ask.tokens]

    def _foreign(self) -> Iterator[str]:
        """Cached tokens that no earlier request of the tenant explains.

        What a client has not heard of an answer's end is not known, and explains any tokens behind what it heard. A
        request that was placed again, or sent to another conductor, finds what it has computed before.
        """
        known: dict[tuple[str, str], list[tuple[Outcome | None, list[int]]]] = {}
        for tenant, context in self._contexts.values():
            known.setdefault((tenant, ""), []).append((None, context))
        known_prompts = [
            outcome for outcome in self._outcomes if outcome.ask.feature != "tools"
        ]  # whose prompts the template makes
        for known_prompt in known_prompts:
            prompt = self._prompt(known_prompt.ask)
            tokens = [(known_prompt, [*prompt, *answer.tokens]) for answer in known_prompt.answers] or [
                (known_prompt, prompt)
            ]
            known.setdefault((known_prompt.ask.tenant, known_prompt.ask.salt), []).extend(tokens)
        for known_prompt in known_prompts:
            again = (
                self._faults.disturbances.any(known_prompt.begin, known_prompt.end)
                or known_prompt.placements > 1
                or known_prompt.resumes > 0
            )
            if not is_sdk(known_prompt.ask):  # tells no placements
                again = again or self.plan.corrupt > 0.0
            if not known_prompt.cached or again:
                continue
            others, prompt = known[known_prompt.ask.tenant, known_prompt.ask.salt], self._prompt(known_prompt.ask)
            if not any(_explains(known_prompt, prompt, other, tokens) for other, tokens in others):
                cached = f"{known_prompt.cached} tokens are cached"
                yield f"{known_prompt.ask}: {cached}, which the tenant has not asked before"


def _explains(outcome: Outcome, prompt: Sequence[int], other: Outcome | None, tokens: Sequence[int]) -> bool:
    """Whether the cached tokens of `it` are those of another request, or of a context."""
    assert outcome.cached is not None
    if other is outcome or (other is not None and other.begin > outcome.end):
        return False
    heard = other is None or (other.ended == "complete" and other.ask.interface not in TEXTS)
    return _common(prompt, tokens) >= (outcome.cached if heard else min(outcome.cached, len(tokens)))


def _common(value: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), min(len(value), len(other))
    )


def _ids_of_texts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The tokens that are spelled by each text."""
    found: dict[str, list[int]] = {}
    for token in tokenizer.with_text(range(tokenizer.vocab_size), skip_special=False):
        found.setdefault(tokenizer.decode([token], skip_special=False), []).append(token)
    return found


KEPT: list[object] = []
"""Storms that are over: what is destroyed would run code of the dead."""


def _judge(plan: StormPlan, checkpoint: Path) -> Judge:
    if not plan.computes:
        return EmulatedJudge()
    if plan.pictures:
        from tests.world.pictures import PictureJudge  # transformers takes seconds to import

        return PictureJudge(checkpoint)
    from tests.world.plain import PlainJudge  # torch takes seconds to import

    return PlainJudge(checkpoint)


def drawn_pictures(seed: int) -> list[Picture]:
    """The pictures of a storm."""
    drawn = random.Random(f"pictures {seed}")
    sizes = [(drawn.randrange(1, 140), drawn.randrange(1, 140)) for _ in range(PICTURES)]
    return [Picture(picture_file(*size, number), *size) for number, size in enumerate(sizes)]


def make_checkpoint(folder: Path, *, pictures: bool = False) -> Path:
    """A tiny random model, whose engine computes: a Llama, or one with pictures."""
    if pictures:
        return add_weights(picture_model(folder))
    from moonpool.engine.models.random_checkpoint import create

    return create("tiny-llama", folder, seed=5, dtype="float32")


def run_storm(plan: StormPlan, checkpoint: Path) -> dict[str, Any]:
    """What comes of a storm, and its story. The process must end with `leave`."""
    logging.disable(logging.ERROR)  # disks that are broken on purpose
    began = time.process_time()
    simulation = Simulation(plan.seed, os.environ.get(MESSAGES))
    with tempfile.TemporaryDirectory(prefix="moonpool-storm-") as folder:
        storm = Storm(simulation, plan, Path(folder), checkpoint)
        KEPT.append((simulation, storm))
        try:
            result = simulation.run(storm.run())
        except Exception:
            result = {"seed": plan.seed, "bad": [traceback.format_exc()], "marks": storm.marks.counts}
    story = [*storm.story, *(storm.faults_told)]
    return {**result, "cpu_s": round(time.process_time() - began, 2), "story": sorted(story, key=_time_of)}


def _time_of(line: str) -> float:
    return float(line.split(" ", 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.world.storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first storm; the next has the next one")
    parser.add_argument("--storms", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--minutes", type=float, help="storms until so much time has passed, however many")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long faults happen in each, virtual time")
    parser.add_argument("--gap-s", type=float, help="mean seconds between two faults; default: by the seed")
    parser.add_argument("--engine", choices=("emulated", "computed"), help="default: by the seed")
    parser.add_argument("--both", action="store_true", help="without prefill: decode instances compute the prompts")
    parser.add_argument("--pictures", action="store_true", help="a model with pictures, whose engine computes")
    parser.add_argument("--ranks", type=int, default=1, help="of each stage of engines that compute")
    parser.add_argument("--hosts", action="store_true", help="one instance of a kind has a stage on a host of its own")
    parser.add_argument("--trace", action="store_true", help="show faults and errors")
    parser.add_argument("--log", help="file for all messages of one storm, a line each")
    args = parser.parse_args()
    tune_gc()
    if args.log:
        os.environ[MESSAGES] = args.log
    began, marks, failed, done = time.monotonic(), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory(prefix="moonpool-checkpoint-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny", pictures=args.pictures)
        for seed in itertools.count(args.seed):
            minutes = (time.monotonic() - began) / 60
            if minutes >= args.minutes if args.minutes else done >= args.storms:
                break
            plan = StormPlan.drawn(seed, args.seconds)
            if args.engine:
                plan = replace(plan, computes=args.engine == "computed")
            if args.gap_s:
                plan = replace(plan, faults=FaultPlan(args.gap_s))
            if args.hosts:
                plan = replace(plan, hosts=HOSTS[bool(args.both)])
            if args.pictures or args.hosts or args.ranks > 1:
                plan = replace(plan, computes=True)
            plan = replace(plan, both=args.both, pictures=args.pictures, ranks=args.ranks)
            error, result = forked(partial(run_storm, plan, checkpoint))
            result = result or {"bad": [error], "marks": {}, "story": []}
            story, met, done = result.pop("story"), result.pop("marks"), done + 1
            marks.update(met)
            print(json.dumps({**result, "marks": sum(map(bool, met.values()))}), flush=True)
            if args.trace:
                print(*story, sep="\n", flush=True)
            if result["bad"]:
                failed += 1
                again = f"python -m tests.world.storm --seed {seed} --seconds {args.seconds:g}"
                again += f" --engine {args.engine}" if args.engine else ""
                again += f" --gap-s {args.gap_s:g}" if args.gap_s else ""
                again += " --both" if args.both else ""
                again += " --pictures" if args.pictures else ""
                again += " --hosts" if args.hosts else ""
                again += f" --ranks {args.ranks}" if args.ranks > 1 else ""
                print(f"repeat with: {again}", file=sys.stderr, flush=True)
            of = f"{args.minutes:g} min" if args.minutes else args.storms
            print(f"{done} of {of}: {failed} failed, {minutes:.1f} min", file=sys.stderr, flush=True)
    print("paths met:", *(f"{count:7} {mark}" for mark, count in marks.items()), sep="\n", file=sys.stderr)
    print(json.dumps({"paths": marks}), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
