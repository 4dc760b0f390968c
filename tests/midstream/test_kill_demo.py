from __future__ import annotations

import asyncio
import io
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from rich.console import Console

from midstream.chunk import Chunk, FinishReason
from midstream.cli.kill_demo import KINDS, PROMPTS, KillDemo
from midstream.cli.kill_view import KillView, summarize
from midstream.cli.run_dir import ProcessPhase, ProcessState, RunState
from midstream.errors import UnavailableError


class Service:
    """Processes that only sleep, and that are restarted when killed; answers depend only on the prompt."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.num_answers = 0
        self.spoil_answer = -1
        self.failing_answer = -1
        parts = tuple(self.start(kind, kind) for kind in KINDS)
        self.state = RunState("model", ProcessPhase.READY, 1, 0.0, parts)

    def start(self, name: str, kind: str) -> ProcessState:
        self.children[name] = subprocess.Popen(["sleep", "60"])
        return ProcessState(name, kind, {}, "", ProcessPhase.READY, self.children[name].pid)

    async def restart_what_dies(self) -> None:
        while True:
            for part in self.state.processes:
                if self.children[part.name].poll() is not None:
                    fresh = self.start(part.name, part.kind)
                    others = tuple(fresh if other is part else other for other in self.state.processes)
                    self.state = replace(self.state, processes=others)
                    self.changed.set()
            await asyncio.sleep(0.001)

    async def generate(self, prompt: str, temperature: float) -> AsyncIterator[Chunk]:
        number, self.num_answers = self.num_answers, self.num_answers + 1
        for offset in range(3):
            await asyncio.sleep(0)
            if number == self.failing_answer:
                raise UnavailableError("no router")
            token = len(prompt) + offset + (offset == 2 and number == self.spoil_answer)
            yield Chunk(0, offset, [token], f"{token} ", is_final=offset == 2, finish_reason=FinishReason.LENGTH)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    restarting = asyncio.create_task(service.restart_what_dies())
    yield service
    restarting.cancel()
    for child in service.children.values():
        child.kill()
        child.wait()


def demo_of(service: Service, log: list[str], num_kills: int = 5) -> KillDemo:
    return KillDemo(
        service.generate,
        lambda: service.state,
        service.changed,
        num_kills=num_kills,
        changed=lambda line: log.append(line) if line else None,
        settle_s=0.01,
    )


async def test_each_kind_is_killed_in_turn_and_every_answer_compared(service: Service) -> None:
    log: list[str] = []
    demo = demo_of(service, log)
    before = {child.pid for child in service.children.values()}
    assert await demo.run()
    assert [kill.name for kill in demo.kills] == [*KINDS, KINDS[0]]
    assert demo.num_identical == demo.num_answers > 0
    assert before.isdisjoint(child.pid for child in service.children.values())
    assert sum(line.startswith("killed ") for line in log) == 5
    assert set(demo.longest_gaps()) == set(KINDS)


@pytest.mark.parametrize("fault", ["spoil_answer", "failing_answer"])
async def test_one_wrong_answer_fails_the_demo(service: Service, fault: str) -> None:
    setattr(service, fault, len(PROMPTS) + 2)  # the third answer after the reference answers
    demo = demo_of(service, [])
    assert not await demo.run()
    assert len(demo.differences) == 1
    expected = "the first 2 are equal" if fault == "spoil_answer" else "no router"
    assert expected in demo.differences[0]
    output = io.StringIO()
    summarize(demo, Console(file=output, width=200))
    assert f"5 kills, {demo.num_answers} streams, identical to the undisturbed run: no" in output.getvalue()


async def test_the_terminal_shows_streams_parts_and_kills(service: Service) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=30, record=True)
    view = KillView(console, lambda: service.state)
    view.demo = demo_of(service, [], num_kills=1)
    await view.demo.run()
    view.changed("killed gpu_worker (1)")
    console.print(view.render())
    text = console.export_text()
    assert "KILLED" in text
    assert "1 of 1 kills" in text
    assert all(answer.prompt[:30] in text for answer in view.demo.current)
    assert "killed gpu_worker" in text
