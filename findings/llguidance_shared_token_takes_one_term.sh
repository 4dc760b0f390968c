#!/bin/sh
# llguidance follows only one of several token terms that contain the same token.
#
# A Lark grammar for llguidance may name tokens: `<[98-99]>` is one of the tokens 98 and 99. Two alternatives may begin
# with terms that share a token.
# Guess before the run: after the shared token both alternatives go on, as they do with regular expressions.
# Seen with llguidance 1.9.1, whose "byte" tokenizer has the bytes as tokens: both alternatives are in the first mask, but
# after the shared token only the first one goes on, without a warning. Regular expressions keep both.
#
# Needs python3. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'END'
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def allowed_after(grammar, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    for token in text.encode():
        assert matcher.consume_token(token), (grammar, text)
    mask = matcher.compute_bitmask()
    return "".join(chr(token) for token in range(128) if mask[token // 8] >> token % 8 & 1)


by_tokens = 'start: (<[97-98]> "1") | (<[98-99]> "2")'  # a, b or b, c
by_texts = 'start: (/[ab]/ "1") | (/[bc]/ "2")'
found = {name: [allowed_after(grammar, text) for text in ("", "a", "b", "c")]
         for name, grammar in (("tokens", by_tokens), ("texts", by_texts))}
print(found)
assert found["texts"] == ["abc", "1", "12", "2"], found
assert found["tokens"] == ["abc", "1", "1", "2"], found
END
