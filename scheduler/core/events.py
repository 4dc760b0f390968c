"""Input events of the core. Each carries the time at which the edge received it.

Times are in nanoseconds, measured by the process's steady clock (midstream/clock.py), which never jumps."""

from __future__ import annotations

from array import array
from dataclasses import field

from midstream.record import record
from scheduler.core.beams import BeamStep
from scheduler.core.failure import Failure
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.pause_mode import PauseMode
from scheduler.core.request import ExtraOutput, Finish, SequenceEnd
from scheduler.core.request_spec import RequestSpec


@record
class Submitted:
    """A router submits a request; answered by Accepted or Refused."""

    time_ns: int
    spec: RequestSpec


@record
class Recovered:
    """A request was read from the journal.

    Attributes:
        outputs: Output tokens so far, by sequence.
        ends: Ends of the ended sequences, by index.
        extras: Extra outputs from workers, by sequence; empty if there are none.
        finish: Set if the request has ended.
        beam_steps: Steps of its beam search.
        kind: Kind of the groups that computed its output; None if it has not started.
        kind_changed_at, earlier_kinds: As in Request.
    """

    time_ns: int
    spec: RequestSpec
    outputs: tuple[array[int], ...]
    ends: tuple[tuple[int, SequenceEnd], ...] = ()
    extras: tuple[tuple[ExtraOutput, ...], ...] = ()
    finish: Finish | None = None
    beam_steps: tuple[BeamStep, ...] = ()
    kind: Kind | None = None
    kind_changed_at: tuple[int, ...] = ()
    earlier_kinds: tuple[EarlierKind, ...] = ()


@record
class AbortRequested:
    """A client aborts a request."""

    time_ns: int
    request_id: str


@record
class Attached:
    """A detokenizer attached to the request's feed."""

    time_ns: int
    request_id: str


@record
class Detached:
    """A detokenizer detached from the request's feed."""

    time_ns: int
    request_id: str


@record
class StopWordFound:
    """A detokenizer found a stop word: the sequence ends with its first `num_tokens` tokens."""

    time_ns: int
    request_id: str
    sequence_index: int
    num_tokens: int
    stop_word: str


@record
class WorkerRegistered:
    """A worker group registers; answered by GroupJoined or GroupRefused.

    Attributes:
        connection: The edge's identifier of the connection; messages to the group are sent there.
        max_batch_size: Maximum number of rows. max_num_tokens: Maximum number of tokens in one step.
        lora_cache_bytes: Device memory for adapters. max_loras: Number of typical adapters that fit into it.
        kept_blocks: Blocks whose contents are kept from an earlier epoch. kept_hashes: Their content hashes.
        kv_store: Groups with the same name can adopt blocks of dead groups with this name; empty if adoption is off.
        tier_store: Groups with the same name share the tiers below their pools; empty if there are no tiers.
        stored_hashes: Hashes of the blocks in the tiers. block_bytes: Size of one block.
        attention_windows: For each layer, how many tokens a query attends to, including its own; 0 means all tokens.
            Empty if unknown, which is treated as all tokens.
        max_attention_window: The setting that limits the windows; 0 means no limit.
        sink_token_length: Number of first tokens that every query attends to in addition to its window.
        role: A Role; empty means both.
        kv_source: Where other groups can fetch blocks of its pool; empty if they cannot.
        num_micro_batches: Number of steps, without sequences in common, that the group computes at the same time.
        block_kind: Groups fetch blocks only from groups with the same value.
        price_per_hour: What the group costs, in any currency.
        sleep_level: The level at which the group sleeps; 0 if it is awake.
    """

    time_ns: int
    connection: bytes
    group_id: str
    incarnation: int
    kind: Kind
    tokens_per_block: int
    num_blocks: int
    vocab_size: int
    max_sequence_length: int
    max_batch_size: int
    max_num_tokens: int
    protocol_version: int
    world_size: int = 1
    device: str = ""
    dtype: str = ""
    features: tuple[str, ...] = ()
    lora_cache_bytes: int = 0
    max_loras: int = 0
    kept_blocks: tuple[int, ...] = ()
    kept_hashes: tuple[int, ...] = ()
    kv_store: str = ""
    tier_store: str = ""
    stored_hashes: tuple[int, ...] = ()
    block_bytes: int = 0
    attention_windows: tuple[int, ...] = ()
    max_attention_window: int = 0
    sink_token_length: int = 0
    role: str = ""
    kv_source: str = ""
    num_micro_batches: int = 1
    block_kind: str = ""
    price_per_hour: float = 0.0
    sleep_level: int = 0

    @property
    def attention_window(self) -> int:
        """The largest window of any layer, in tokens; 0 if a layer may attend to every token of a sequence."""
        widest = max(self.attention_windows, default=0)
        if 0 in self.attention_windows or widest >= self.max_sequence_length:
            return 0
        return widest


@record
class WeightsHashed:
    """A group has hashed its weights completely since it registered.

    Attributes:
        weights_root: As in Kind.
        block_kind: As in WorkerRegistered.
    """

    time_ns: int
    connection: bytes
    epoch: int
    weights_root: str
    block_kind: str = ""


@record
class WorkerBeat:
    """A heartbeat of a worker, with the blocks stored in and removed from its tiers since the last one."""

    time_ns: int
    connection: bytes
    epoch: int
    last_step_id: int
    memory: tuple[int, int, int] = (0, 0, 0)  # bytes on the host, on the device and pinned
    stored_hashes: tuple[int, ...] = ()
    removed_hashes: tuple[int, ...] = ()


@record
class WorkerLeft:
    """A worker group deregisters; its requests move to other groups, which can adopt its blocks if it leaves them."""

    time_ns: int
    connection: bytes
    epoch: int
    reason: str = ""
    leaves_blocks: bool = False


@record
class WorkerLost:
    """The connection of a worker group was lost: its process died, or the network failed."""

    time_ns: int
    connection: bytes


@record
class WorkerFailed:
    """A worker sent an invalid message or one that could not be processed, or did not answer in time."""

    time_ns: int
    connection: bytes
    reason: str


@record
class StepDone:
    """A step's result.

    Attributes:
        token_ids: Tokens of the sampled rows, in the order of the step.
        num_tokens: Number of tokens of each sampled row; empty if each has one.
        failures: Rows that failed, with their errors.
        outputs: Serialized extra outputs, by row.
        candidate_log_probs: Log probabilities of the candidates of all beam rows, in order.
        candidate_stop_words: The stop words that these candidates complete, as in BeamStep; empty if there are none.
        num_drafts: Number of verified drafts of each sampled row; empty if there are none.
        missing_blocks: Blocks to adopt that were not found.
        logit_digests: A digest of each sampled row's logits; empty unless the plan asked for them.
    """

    time_ns: int
    connection: bytes
    epoch: int
    step_id: int
    token_ids: list[int]
    num_tokens: list[int] = field(default_factory=list)
    failures: tuple[tuple[int, Failure], ...] = ()
    outputs: tuple[tuple[int, bytes], ...] = ()
    forward_us: int = 0
    waiting_us: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    candidate_log_probs: list[float] = field(default_factory=list)
    candidate_stop_words: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    missing_blocks: frozenset[int] = frozenset()
    logit_digests: tuple[int, ...] = ()


@record
class BlocksFetched:
    """Answer to FetchBlocks: a group has fetched blocks of another group, or failed to."""

    time_ns: int
    connection: bytes
    epoch: int
    fetched_hashes: tuple[int, ...] = ()
    missing_hashes: tuple[int, ...] = ()


@record
class WeightsChanged:
    """All groups are to have these weights from now on; requests continue under them. The fields are as in Kind."""

    time_ns: int
    model_fingerprint: str
    weights_root: str
    weights_version: str = ""


@record
class GenerationPaused:
    """No step runs from now on, until GenerationResumed."""

    time_ns: int
    mode: PauseMode


@record
class SleepSet:
    """An administrator lets all groups sleep at a level, or wakes them (level 0); no step runs while `is_held`."""

    time_ns: int
    level: int
    is_held: bool


@record
class GenerationResumed:
    """Steps run again."""

    time_ns: int


@record
class Turn:
    """All pending events have been applied: run timers, place requests, plan steps."""

    time_ns: int


@record
class DrainStarted:
    """The scheduler stops accepting requests."""

    time_ns: int


Event = (
    Submitted
    | Recovered
    | AbortRequested
    | Attached
    | Detached
    | StopWordFound
    | WorkerRegistered
    | WeightsHashed
    | WorkerBeat
    | WorkerLeft
    | WorkerLost
    | WorkerFailed
    | StepDone
    | BlocksFetched
    | WeightsChanged
    | GenerationPaused
    | GenerationResumed
    | SleepSet
    | Turn
    | DrainStarted
)
