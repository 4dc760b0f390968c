"""The number of threads that compute steps with few tokens."""

from collections.abc import Callable

from kernels.cpu.threads import StepThreads


def numbers(threads: StepThreads, num_steps: int, seconds: Callable[[int], float], num_tokens: int = 1) -> list[int]:
    """Return the number of threads chosen for each step; `seconds` returns a step's duration, given this number."""
    chosen = []
    for _ in range(num_steps):
        chosen.append(threads.number(num_tokens))
        threads.note(num_tokens, chosen[-1], seconds(chosen[-1]))
    return chosen


def test_both_numbers_are_tried_and_the_faster_is_kept() -> None:
    assert numbers(StepThreads(4), 10, {4: 1.0, 3: 0.9}.__getitem__) == [4, 3, 4, 3, 4, 3, 3, 3, 3, 3]
    assert numbers(StepThreads(4), 10, {4: 0.9, 3: 1.0}.__getitem__) == [4, 3, 4, 3, 4, 3, 4, 4, 4, 4]


def test_the_slower_number_is_tried_again_in_one_of_32_steps() -> None:
    threads = StepThreads(2)
    numbers(threads, 6, {2: 1.0, 1: 2.0}.__getitem__)
    assert numbers(threads, 60, {2: 1.0, 1: 2.0}.__getitem__) == [2] * 26 + [1] + [2] * 31 + [1] + [2]


def test_the_choice_follows_the_last_eight_times_of_each_number() -> None:
    threads = StepThreads(2)
    numbers(threads, 20, {2: 1.0, 1: 1.5}.__getitem__)
    # Another program now interrupts one of the threads. The mean of the last eight times without the longest exceeds
    # 1.5 after seven steps.
    assert numbers(threads, 10, {2: 1.6, 1: 1.5}.__getitem__) == [2] * 7 + [1] * 3


def test_one_long_step_changes_nothing() -> None:
    threads = StepThreads(2)
    numbers(threads, 6, {2: 1.0, 1: 1.1}.__getitem__)
    assert numbers(threads, 1, lambda _: 60.0) == [2]
    assert numbers(threads, 20, {2: 1.0, 1: 1.1}.__getitem__) == [2] * 20


def test_each_number_of_tokens_has_its_own_times() -> None:
    threads = StepThreads(2)
    numbers(threads, 10, {2: 1.0, 1: 0.5}.__getitem__)
    assert numbers(threads, 10, {2: 0.5, 1: 1.0}.__getitem__, num_tokens=8) == [2, 1, 2, 1, 2, 1, 2, 2, 2, 2]
    assert threads.number(1) == 1


def test_larger_steps_use_all_threads_and_a_single_thread_is_never_given_up() -> None:
    assert numbers(StepThreads(4), 40, {4: 2.0, 3: 1.0}.__getitem__, num_tokens=9) == [4] * 40
    assert numbers(StepThreads(1), 40, {1: 1.0}.__getitem__) == [1] * 40
