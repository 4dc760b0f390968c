"""Scores from a model that was trained to tell whether a document fits a query, as defined by sentence-transformers.

Either the model answers yes or no: the folder's `1_LogitScore/config.json` names the tokens of the two answers. Or it
has a classification head with one or two classes, whose logits the workers report as those of the first tokens. The
query and the document are messages with the roles `query` and `document` (see PromptBuilder).

The classes of a text, for any number of classes, are those of vLLM: their probabilities follow from `problem_type`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder

_SIGMOID, _IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
_SHORT_NAMES = {"torch.nn.Sigmoid": _SIGMOID, "torch.nn.Identity": _IDENTITY}


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens of the two answers, or the classes of a classification head.

    Attributes:
        no: If None, a score is the logit of `yes` alone.
        activation: What makes a score of the logits, by its name in PyTorch.
    """

    yes: int
    no: int | None = None
    activation: str = _SIGMOID

    @property
    def output(self) -> str:
        """Name of the additional output with the logits of the answers."""
        return f"token_logits.{self.yes}" if self.no is None else f"token_logits.{self.yes}.{self.no}"

    def score(self, logits: Sequence[float], *, is_raw: bool = False) -> float:
        """Return the score, given the values of `output`: with the sigmoid, the probability of `yes`.

        Args:
            is_raw: Whether to return the logit, without the activation.

        Raises:
            UnsupportedError: The activation is not supported.
        """
        log_odds = logits[0] - (logits[1] if self.no is not None else 0.0)
        if is_raw or self.activation == _IDENTITY:
            return log_odds
        if self.activation != _SIGMOID:
            raise UnsupportedError(f"scores with the activation {self.activation} are not computed", field="model")
        return _sigmoid(log_odds)


def answers_of(folder: ModelFolder) -> Answers | None:
    """Return the model's answers; None if the model was not trained to score this way, or has no head. Raises
    ConfigError if the file is not JSON, or does not name tokens of the model.
    """
    if folder.num_labels is not None:
        # With two classes, a score is the probability of the second.
        return {1: Answers(0, activation=_activation(folder)), 2: Answers(1, 0)}.get(folder.num_labels)
    if not folder.has_head:
        return None
    file = folder.path / "1_LogitScore" / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        yes, no = config["true_token_id"], config.get("false_token_id")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} does not define how to compute a score: {error!r}", field="model") from None
    for token in (yes, 0 if no is None else no):
        if type(token) is not int or not 0 <= token < folder.vocab_size:
            raise ConfigError(f"{file}: {token!r} is not a token of the model", field="model")
    return Answers(yes, no)


def _activation(folder: ModelFolder) -> str:
    """Return the activation that config.json names, as CrossEncoder of sentence-transformers reads it."""
    settings = folder.config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name or folder.config.get("sbert_ce_default_activation_function") or _SIGMOID
    return _SHORT_NAMES.get(str(name), str(name))


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a classification head.

    Attributes:
        labels: Their names.
        problem_type: That of config.json; None if it has none.
    """

    labels: tuple[str, ...]
    problem_type: object = None

    def probabilities(self, logits: Sequence[float], *, is_raw: bool = False) -> list[float]:
        """Return the probability of each class, given their logits; with `is_raw`, or if the problem is a regression,
        the logits.
        """
        if is_raw or self.problem_type == "regression":
            return list(logits)
        if self.problem_type == "multi_label_classification" or len(logits) == 1:
            return [_sigmoid(value) for value in logits]
        most = max(logits)
        powers = [math.exp(value - most) for value in logits]
        return [power / math.fsum(powers) for power in powers]


def classes_of(folder: ModelFolder) -> Classes:
    """Return the model's classes; without a classification head there are none."""
    return Classes(folder.labels, folder.config.get("problem_type"))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
