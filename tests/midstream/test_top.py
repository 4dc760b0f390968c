from __future__ import annotations

import io

import pytest
from rich.console import Console

from midstream.cli import main
from midstream.cli.top.board import Board
from midstream.cli.top.charts import block_map, columns, share_bar
from midstream.cli.top.view import frame
from protos import status_pb2

Part = status_pb2.PartStatus


def state(*samples: status_pb2.StatusSample) -> status_pb2.SystemStatus:
    return status_pb2.SystemStatus(
        model="smollm2",
        router_id="router-0",
        parts=[
            Part(kind="router", name="router-0", state=Part.SERVING, detail="2 streams"),
            Part(kind="worker", name="[bold]worker[/bold]", state=Part.LOST, detail="last seen 3 s ago"),
        ],
        requests=status_pb2.RequestCounts(num_queued=5, num_paused=1, num_context=2, num_generation=17),
        groups=[
            status_pb2.GroupStatus(
                group_id="worker-1",
                num_sequences=19,
                max_num_sequences=64,
                steps_per_s=8.25,
                num_blocks=8,
                num_held_blocks=5,
                num_shared_blocks=2,
                num_cached_blocks=1,
                num_stored_blocks=1200,
                block_map=status_pb2.BlockMap(
                    blocks_per_cell=2, held=[0, 2, 1, 0], shared=[2, 0, 0, 0], cached=[0, 0, 1, 0]
                ),
            )
        ],
        counts=status_pb2.CountsSinceStart(
            num_finished_by_reason={"stop": 1234, "abort": 2}, num_recoveries=3, num_handovers=6
        ),
        samples=samples or [status_pb2.StatusSample(generated_tokens_per_s=321.4, inter_token_p50_ms=12.3)],
        latency_window_s=10,
    )


def shown(board: Board, width: int = 120) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(frame(board, width))
    return output.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_frame_contains_everything_and_fits(width: int) -> None:
    board = Board()
    board.take(state(), is_first=True)
    text = shown(board, width)
    assert max(map(len, text.splitlines())) <= width
    for word in (
        "smollm2", "321 generated", "12 ms", "17 generating", "2 in context", "5 queued", "1 paused", "1,234 stop",
        "3 recovered", "● serving", "✕ lost", "[bold]worker", "19 of 64 sequences", "▓██·",
    ):  # fmt: skip
        assert word in text


def test_a_wide_frame_shows_the_contents_of_tiers_and_transfers() -> None:
    board = Board()
    board.take(state(), is_first=True)
    text = shown(board, 200)
    assert "of 8 blocks, 1,200 in tiers" in text
    assert "6 moved from prefill to decode" in text


def test_bars_grow_with_their_values() -> None:
    assert columns([0, 1, 8, 16], width=5, height=2) == ["    █", "  ▁██"]
    assert columns([], width=2, height=1) == ["  "]
    assert columns([1, 2, 3, 4], width=2, height=1) == ["▆█"]


def test_a_share_gets_at_least_one_cell() -> None:
    bar = share_bar([(98, "red"), (1, "blue"), (0, "green")], 10)
    assert bar.plain == "█" * 10
    assert [(span.start, span.end, span.style) for span in bar.spans] == [(0, 9, "red"), (9, 10, "blue")]
    assert share_bar([(0, "red")], 4).plain == "────"


def test_a_map_too_large_for_its_rows_shows_runs_of_blocks() -> None:
    blocks = status_pb2.BlockMap(held=[0, 0, 0, 1, 0, 0], shared=[0, 0, 0, 0, 0, 1], cached=[1, 0, 0, 0, 0, 0])
    assert block_map(blocks, width=3, max_rows=2).plain == "▒··\n█·▓"
    assert block_map(blocks, width=3, max_rows=1).plain == "▒█▓"


def test_samples_grow_and_a_new_connection_begins_anew() -> None:
    board = Board()
    one, two, three = (status_pb2.StatusSample(time_unix_ms=time) for time in (1, 2, 3))
    board.take(state(one, two), is_first=True)
    board.take(state(three), is_first=False)
    assert [sample.time_unix_ms for sample in board.samples] == [1, 2, 3]
    board.take(state(two, three), is_first=True)
    assert [sample.time_unix_ms for sample in board.samples] == [2, 3]


def test_losses_and_silence_are_reported_and_known_state_stays() -> None:
    now = [100.0]
    board = Board(lambda: now[0])
    assert "Connecting" in shown(board)
    board.take(state(), is_first=True)
    assert board.problem == ""
    now[0] = 104.0
    assert board.problem == "No update for 4 s"
    board.lose("connection refused")
    assert "No router answers (connection refused); trying again" in shown(board)
    assert "17 generating" in shown(board)
    board.take(state(), is_first=True)
    assert board.problem == ""


def test_without_a_service_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("midstream top: ")
