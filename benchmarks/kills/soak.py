"""Run at saturation for minutes while clients disconnect, deadlines expire and processes die; check memory and KV
blocks.

1. Clients send requests continuously, more than the workers have rows for. A request runs to completion, or its client
   disconnects at a random moment, or its deadline expires. Complete outputs are compared with the expected outputs, and
   partial outputs with a prefix of these.
2. Every `--fault-interval` seconds the second worker, detokenizer or router is killed or suspended for a while. The
   scheduler is killed once, early, so that the memory of its successor is observed for most of the time.
3. The memory of every process is sampled. The slope is that of a line fitted to the samples after the warm-up.
4. At the end everything must be idle and all blocks must be free.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.kills.load import Ledger, Question, ask, expectations, is_identical, make_questions
from benchmarks.kills.service import KilledService, running_service
from midstream.client import AsyncClient, Result
from midstream.errors import DeadlineError, MidstreamError

_ROWS = 16  # of each of the two workers
_SAMPLE_S = 2.0
# A process allocates memory while it loads, and on the first requests of each kind.
_WARM_UP_SHARE, _LEAST_LIFE_S = 0.25, 120.0
_STANDSTILL_S = 5.0
_IDLE_TIMEOUT_S = 60.0
_MIB = 1 << 20


@dataclass
class Life:
    """Samples of the memory use of one process over its lifetime, in seconds and bytes."""

    name: str
    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def settled(self) -> tuple[list[float], list[float]]:
        """Return the samples after the warm-up, as minutes and MiB."""
        start = self.times[0] + _WARM_UP_SHARE * (self.times[-1] - self.times[0])
        kept = [(when / 60, size / _MIB) for when, size in zip(self.times, self.sizes, strict=True) if when >= start]
        return [when for when, _ in kept], [size for _, size in kept]

    @property
    def slope(self) -> float:
        """Return the slope in MiB per minute."""
        return statistics.linear_regression(*self.settled).slope


async def run_soak(model: str, seconds: float, num_clients: int, fault_interval_s: float, console: Console) -> bool:
    """Run the soak test; return whether every output is correct and every block was released."""
    dice = random.Random(10)
    questions = make_questions(32, 64, prompt_tokens=(16, 96))
    with running_service(model, 2, 2, 2, MIDSTREAM_MAX_BATCH_SIZE=str(_ROWS)) as service:
        async with AsyncClient(service.routers, unavailable_timeout_s=120) as client:
            expected = await expectations(client, questions, len(questions))
            console.print(f"the expected outputs of {len(questions)} requests are known; {seconds:.0f} s of load begin")
            ledger, fates, is_over = Ledger(), Counter[str](), asyncio.Event()
            lives: dict[tuple[str, int], Life] = {}
            sampling = asyncio.create_task(_sample(service, lives))
            faults = asyncio.create_task(_make_faults(service, fault_interval_s, seconds))
            started = time.monotonic()
            asking = [
                asyncio.create_task(_keep_asking(client, questions, expected, dice, ledger, fates, is_over))
                for _ in range(num_clients)
            ]
            await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            is_over.set()
            await asyncio.gather(*asking)
            num_faults = await faults
            took_s = time.monotonic() - started
            blocks = await _blocks_when_idle(client)
            sampling.cancel()
    console.print(f"{took_s:.0f} s, {num_clients} clients; faults: {_listed(num_faults)}")
    console.print(f"{sum(fates.values())} requests: {_listed(fates)}; {ledger.num_resumes} resumes by clients")
    console.print(f"blocks in use when idle: {blocks}")
    console.print(_memory_table([life for life in lives.values() if life.times[-1] - life.times[0] >= _LEAST_LIFE_S]))
    for failure in sorted(set(ledger.failures)):
        console.print(f"[red]{ledger.failures.count(failure)} × {failure}")
    return not ledger.failures and not fates["different"] and blocks == "0"


async def _keep_asking(
    client: AsyncClient,
    questions: list[Question],
    expected: list[Result],
    dice: random.Random,
    ledger: Ledger,
    fates: Counter[str],
    is_over: asyncio.Event,
) -> None:
    while not is_over.is_set():
        number = dice.randrange(len(questions))
        question, right = questions[number], expected[number]
        throw = dice.random()
        if throw < 0.6:
            result = await ask(client, question, 0, ledger)
            if result is not None:
                fates["identical" if is_identical(result, right) else "different"] += 1
            ledger.arrivals.clear()
        elif throw < 0.9:
            fates[await _leave(client, question, right, dice.uniform(0, 8), None)] += 1
        else:
            fates[await _leave(client, question, right, None, dice.uniform(0.1, 8))] += 1


async def _leave(
    client: AsyncClient, question: Question, right: Result, stay_s: float | None, timeout_s: float | None
) -> str:
    """Run a request that its client or its deadline may end early; return its outcome."""
    stream = client.generate(token_ids=question.token_ids, sampling=question.sampling, timeout_s=timeout_s)
    result, fate = Result(stream.request_id), "identical"
    try:
        async with asyncio.timeout(stay_s):
            async for chunk in stream:
                result.add(chunk)
    except TimeoutError:
        fate = "abandoned by its client"
    except DeadlineError:
        fate = "past its deadline"
    except MidstreamError as error:
        return f"{type(error).__name__}: {error}"
    is_right = right.token_ids[: len(result.token_ids)] == result.token_ids and right.text.startswith(result.text)
    return fate if is_right else "different"


async def _make_faults(service: KilledService, interval_s: float, seconds: float) -> Counter[str]:
    made: Counter[str] = Counter()
    end = time.monotonic() + seconds - interval_s
    turns = itertools.cycle(("worker-1", "detokenizer-1", "router-1", "worker-1 stands still"))
    await asyncio.sleep(interval_s)
    await asyncio.to_thread(service.kill, "scheduler")
    made["scheduler"] += 1
    while time.monotonic() + interval_s < end:
        await asyncio.sleep(interval_s)
        turn = next(turns)
        pid = service.pids().get(turn.split()[0])
        if pid is None:
            continue
        made[turn] += 1
        with contextlib.suppress(ProcessLookupError):
            if turn.endswith("still"):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(_STANDSTILL_S)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
    return made


async def _sample(service: KilledService, lives: dict[tuple[str, int], Life]) -> None:
    while True:
        pids = service.pids() | {"clients": os.getpid()}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                size = psutil.Process(pid).memory_info().rss
                life = lives.setdefault((name, pid), Life(name))
                life.times.append(time.monotonic())
                life.sizes.append(size)
        await asyncio.sleep(_SAMPLE_S)


async def _blocks_when_idle(client: AsyncClient) -> str:
    """Return the KV blocks in use when idle, and the violations of block conservation."""
    give_up_at = time.monotonic() + _IDLE_TIMEOUT_S
    while True:
        stats = await anext(client.iteration_stats())
        violations = int(str(stats.get("numConservationViolations", 0)))
        cache = stats["kvCacheStats"]
        assert isinstance(cache, dict)
        used, active = int(cache["usedNumBlocks"]), int(str(stats["numActiveRequests"]))
        if not (used or active) or time.monotonic() > give_up_at:
            return (
                f"{used}"
                + (f", {active} requests still active" if active else "")
                + (f", {violations} violations of block conservation" if violations else "")
            )
        await asyncio.sleep(0.5)


def _memory_table(lives: list[Life]) -> Table:
    table = Table("process", "life, s", "first MiB", "last MiB", "slope, MiB/min")
    for life in sorted(lives, key=lambda life: life.name):
        _, sizes = life.settled
        row = (f"{life.times[-1] - life.times[0]:.0f}", f"{sizes[0]:.1f}", f"{sizes[-1]:.1f}", f"{life.slope:+.2f}")
        table.add_row(life.name, *row)
    return table


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
