"""Flags for the features of a sequence other than sampling a token from unmodified logits."""

from __future__ import annotations

import enum

from gpu_worker.batch.step import NOTHING, NewSequence, SamplingParams


class Feature(enum.IntFlag):
    """Processing that a row needs in addition to sampling; rows without a feature do not incur its cost."""

    PENALTIES = 1
    BIAS = 2
    MIN_TOKENS = 4
    LOG_PROBS = 8
    BAD_WORDS = 16
    NGRAMS = 32
    TOP_P_DECAY = 64
    REPORTS = 128
    PROMPT_REPORTS = 256
    GUIDED = 512
    POST_PROCESSED = 1024
    TRACED = 2048
    BEAMS = 4096
    ALLOWED_TOKENS = 8192


def features_of(new: NewSequence) -> Feature:
    features = _of_sampling(new.sampling) | _of_outputs(new)
    if new.guide is not None:
        features |= Feature.GUIDED
    if new.post_processor:
        features |= Feature.POST_PROCESSED
    return features


def _of_sampling(sampling: SamplingParams) -> Feature:
    features = Feature(0)
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
        features |= Feature.PENALTIES
    if sampling.embedding_bias:
        features |= Feature.BIAS
    if sampling.min_tokens and sampling.end_ids:
        features |= Feature.MIN_TOKENS
    if sampling.beam_width > 1:
        features |= Feature.BEAMS
    elif sampling.log_probs is not None:
        features |= Feature.LOG_PROBS
    if sampling.bad_words:
        features |= Feature.BAD_WORDS
    if sampling.no_repeat_ngram_size:
        features |= Feature.NGRAMS
    if sampling.allowed_token_ids:
        features |= Feature.ALLOWED_TOKENS
    if sampling.top_p_decay != 1.0:
        features |= Feature.TOP_P_DECAY
    return features


def _of_outputs(new: NewSequence) -> Feature:
    if new.outputs is NOTHING:
        return Feature(0)
    # The sequences of a request share the prompt; the first sequence reports the prompt's outputs, unless it has
    # already done so.
    is_first = new.sequence_index == 0 and len(new.token_ids) == new.num_prompt_tokens
    features = Feature.REPORTS | (Feature.PROMPT_REPORTS if is_first and new.outputs.of_prompt else 0)
    return features | (Feature.TRACED if new.outputs.sampling and new.sampling.beam_width == 1 else 0)
