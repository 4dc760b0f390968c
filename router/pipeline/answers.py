"""Scores from a model that was trained to tell whether a document fits a query, as defined by sentence-transformers.

Either the model answers yes or no: the folder's `1_LogitScore/config.json` names the tokens of the two answers. Or it
has a classification head with one or two classes, whose logits the workers report as those of the first tokens. The
query and the document are messages with the roles `query` and `document` (see PromptBuilder).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens of the two answers, or the classes of a classification head.

    Attributes:
        no: If None, a score is the logit of `yes` alone.
    """

    yes: int
    no: int | None = None

    @property
    def output(self) -> str:
        """Name of the additional output with the logits of the answers."""
        return f"token_logits.{self.yes}" if self.no is None else f"token_logits.{self.yes}.{self.no}"

    def score(self, logits: Sequence[float]) -> float:
        """Return the probability of `yes`, given the values of `output`."""
        log_odds = logits[0] - (logits[1] if self.no is not None else 0.0)
        return 1 / (1 + math.exp(-log_odds)) if log_odds > -700 else 0.0


# With two classes, a score is the probability of the second.
_CLASSES = {1: Answers(0), 2: Answers(1, 0)}


def answers_of(folder: ModelFolder) -> Answers | None:
    """Return the model's answers; None if the model was not trained to score this way, or has no head. Raises
    ConfigError if the file is not JSON, or does not name tokens of the model.
    """
    if folder.num_labels is not None:
        return _CLASSES.get(folder.num_labels)
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
