from __future__ import annotations

from collections.abc import AsyncIterator

from benchmarks.league.__main__ import row_of
from benchmarks.league.load import Request, make_requests, run_round


class System:
    """Answers with four pieces; once it is hurt, plain requests break off and guided ones say something else."""

    def __init__(self) -> None:
        self.is_hurt = False

    def hurt(self) -> None:
        self.is_hurt = True

    async def stream(self, request: Request) -> AsyncIterator[tuple[int, str]]:
        for number in range(4):
            yield 0, f"{request.prompt} {number} "
        if self.is_hurt and request.kind == "plain":
            raise ValueError("the stream broke off")
        yield 0, "other" if self.is_hurt and request.kind == "guided" else "end"


async def test_a_row_counts_what_is_complete_and_what_is_identical() -> None:
    system, requests = System(), make_requests(8, 5)
    expected = await run_round(system.stream, requests, None)
    whole = row_of("a system", "nothing", requests, expected, await run_round(system.stream, requests, lambda: None))
    assert (whole["requests"], whole["complete"], whole["identical"], whole["errors"]) == (8, 8, 8, [])
    system.hurt()
    hurt = row_of("a system", "killed", requests, expected, await run_round(system.stream, requests, None))
    assert hurt["by_kind"] == {"plain": [4, 0, 0], "n=3": [2, 2, 2], "guided": [2, 2, 0]}
    assert (hurt["complete"], hurt["identical"], hurt["errors"]) == (4, 2, ["ValueError: the stream broke off"])


async def test_the_fault_comes_while_streams_are_open() -> None:
    seen: list[int] = []
    system, requests = System(), make_requests(4, 5)
    outcomes = await run_round(system.stream, requests, lambda: seen.append(1))
    assert seen == [1]
    assert [outcome.texts[0].endswith("end") for outcome in outcomes] == [True] * 4
