"""GBNF grammars run by llguidance: they match the same texts as in llama.cpp's definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from midstream.grammar.compile import GuideError, GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.lexemes import to_lark
from midstream.grammar.messages import Guide
from midstream.model.folder import open_model_folder

Matches = Callable[[str, str], bool]
LETTERS = "abcd"
TEXTS = ["".join(letters) for length in range(4) for letters in itertools.product(LETTERS, repeat=length)]
# The grammar in llama.cpp's documentation.
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
XML = r"""root ::= element
element ::= "<" name ">" (text | element)* "</" name ">"
text ::= [^<]+
name ::= [a-z]+"""


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    folder = open_model_folder("smollm2")
    return load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))


TAGS = """root ::= TagDispatch(("<t>", a), ("<u>", b), excludes=("bad"))
a ::= "x</t>"
b ::= [a-z]{1,2}
"""


@pytest.fixture(scope="module")
def matches(tokenizer: llguidance.LLTokenizer) -> Matches:
    def check(grammar: str, text: str) -> bool:
        matcher = compile_guide(Guide("ebnf", grammar), tokenizer)
        tokens = tokenizer.tokenize_str(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    return check


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        # Characters and escapes.
        ('root ::= "a\nb\t\x01"', "a\nb\t\x01"),
        (r'root ::= "\n\x41\u00e9\U0001F600\"\\\[\]\/\b"', '\nAé😀"\\[]/\b'),
        (r"root ::= [\u00e9\x41\]/[]{5}", "éA]/["),
        ("root ::= [&~+--]{4}", "&~,-"),
        ("root ::= . [^a]", "\n\n"),
        # Names and layout.
        ('root ::= start\nstart ::= fooBar foo-bar\nfooBar ::= "x"\nfoo-bar ::= 1é\n1é ::= "y"', "xy"),
        ('# start: none\n\nroot ::= # one\n  "a" # two\n  | "b"\r\n\r\n', "b"),
        ('root ::= "a" |\n  ("b"\n  "c")', "bc"),
        ('root ::= "start: x"', "start: x"),
        ('root ::= "a" ""{3} | ', ""),
        # The text matches only if a rule or literal does not take its longest match.
        ('root ::= ident "x"\nident ::= [a-z]+', "abx"),
        ('root ::= "(" root ")" | ident "x"\nident ::= [a-z]+', "(abx)"),
        ('root ::= "a" "b" | "ab" "c" root', "ab"),
        ('root ::= "a" "a" "a" | "aa" root', "aaa"),
        ('root ::= word word root?\nword ::= [a-z]+ "."?', "ab"),
        ('root ::= "if" " y" root? | word " x" root?\nword ::= [a-z]+', "if x"),
        ('root ::= "(" root ")" | [dab]{0,2} rest\nrest ::= root | [adc] "bbc"', "dbbc"),
        # XGrammar's dialect.
        ('root ::= "a"\n  b.c\n\nb.c ::= "d"', "ad"),
        ('root ::= b. c\nb ::= "b"\nc ::= "c"', "b.c"),  # here, the dot is any character
        ('root ::= a "c"\na ::= "x" (= "b" | [a-z]+)\n', "xc"),
        (r'root ::= "\a\v\e\0"', "\a\v\x1b\0"),
        (TAGS, "hello<t>x</t> and <u>abc<t>x</t>"),
        (TAGS, "hello<t, <"),
        (TAGS, "a<u>b"),
        (TAGS.replace(")\n", ", loop_after_dispatch=false)\n", 1), "a<u>b"),
        ("root ::= TagDispatch()", "abc"),
        # Recursion.
        ('root ::= root "a" | "b"', "baaa"),
        ('root ::= Token(a)\nToken ::= "b"\na ::= "c"', "bc"),
        (JSON, '{"a": [1,-2.5e1, true, null,"x\\u00e9 \\" é"], "b":{}}'),
    ],
)
def test_a_text_of_the_language_matches(matches: Matches, grammar: str, text: str) -> None:
    assert matches(grammar, text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (TAGS, "<t>"),
        (TAGS, "x<t>y"),
        (TAGS, "a bad"),
        (TAGS, "<u>"),
        (TAGS.replace(")\n", ", loop_after_dispatch=false)\n", 1), "a<t>x</t>b"),
        ('root ::= "a"\n  b.c\n\nb.c ::= "d"', "a"),
    ],
)
def test_other_text_does_not_match(matches: Matches, grammar: str, text: str) -> None:
    assert not matches(grammar, text)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= missing", "the rule 'missing' is not defined"),
        ('rule ::= "a"', "the grammar has no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "the rule 'root' is defined twice"),
        ('root ::= "a', "line 1, column 12: expected the end of a literal or of a character class"),
        ('root ::= "a"\nb ::= "\\q"', 'line 2, column 9: expected an escape sequence such as \\n, \\" or \\x41'),
        (r'root ::= "\xg1"', "line 1, column 13: expected 2 hexadecimal digits"),
        ("root ::= [z-a]", "line 1, column 14: expected a range in ascending order"),
        ("root ::= []", "a character class has no characters"),
        ('root ::= "a"{3,2}', "line 1, column 18: expected a maximum that is not below the minimum"),
        ('root ::= ("a"', "line 1, column 14: expected ')'"),
        ('root = "a"', "line 1, column 6: expected '::='"),
        ('root ::= "a" =', "line 1, column 14: expected a literal, a character class, a group or the name of a rule"),
        ('root ::= "a" !', "line 1, column 14: expected a token such as <[5]> or <name>"),
        ("root ::= <none>", "<none> is not one of the tokenizer's added tokens; give its id, as in <[5]>"),
        ('root ::= !<[1]>* "a"', "where all tokens but some may follow, text may not: it consists of tokens, too"),
        ("root ::= Token()", "Token must have at least one id"),
        ('root ::= TokenTagDispatch((5, a), excludes=(5))\na ::= "c"', "TokenTagDispatch lists a token twice"),
        ('root ::= "a" TagDispatch(("b", a))\na ::= "c"', "TagDispatch must be all of the rule 'root'"),
        ('root ::= TagDispatch(("<", a), ("<a", a))\na ::= "c"', "the tag '<a' begins with the tag '<'"),
        ('root ::= TagDispatch(stop="a")', "TagDispatch has the unknown argument 'stop'"),
        ("root ::= " + "(" * 3000, "is nested too deeply"),
    ],
)
def test_the_reason_says_what_is_wrong(matches: Matches, grammar: str, reason: str) -> None:
    with pytest.raises(GuideError) as raised:
        matches(grammar, "")
    assert str(raised.value) == reason


DISPATCH = 'root ::= TokenTagDispatch((5, a), (6, b), excludes=(7,))\na ::= "x" [0-9]* "."\nb ::= "y"'


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        ("root ::= <[5]> [a-z]+", [[5, "ab"]], [["ab"], [6, "ab"], [5], [5, 5]]),
        ("root ::= <|im_start|> 'a' <file_sep>", [[1, "a", 5]], [["a"], [1, "a"], [1, "<file_sep>"]]),
        ("root ::= !<|im_start|> 'a'", [[3, "a"], ["b", "a"], ["a", "a"]], [[1, "a"], ["a"]]),
        ("root ::= !<[1]>{2}", [[7, 3], ["a", "c"]], [[7, 1], [7], [7, 3, "c"]]),
        ("root ::= [a-z]* <[5]> rest\nrest ::= Token(6, 7) | 'b'", [["ab", 5, 7], [5, "b"]], [[5], [5, 5], ["ab"]]),
        ("root ::= ExcludeToken(1, 7)* Token(7)", [[7], ["any", 3, "\n", 7]], [[1, 7], ["a"], [7, 7]]),
        (DISPATCH, [[], ["a", 3], ["a", 5, "x1.", "y", 6, "y"]], [[5], [5, "y"], [7], [6, "x"]]),
        (DISPATCH.replace("excludes", "loop_after_dispatch=false, excludes"), [["a", 5, "x12."]], [[6, "y", "a"], [7]]),
        ("root ::= !<[1]>* <[5]>", [[5], [5, 7, 5]], [[1, 5], [5, 7]]),
    ],
)
def test_tokens_are_given_by_id_or_name(
    tokenizer: GuideTokenizer, grammar: str, accepted: list[list[str | int]], refused: list[list[str | int]]
) -> None:
    matcher = compile_guide(Guide("ebnf", grammar.replace("'", '"')), tokenizer)
    for parts, expected in [*((parts, True) for parts in accepted), *((parts, False) for parts in refused)]:
        ids = [part if isinstance(part, int) else tokenizer.library.tokenize_str(part) for part in parts]
        tokens = [token for part in ids for token in (part if isinstance(part, list) else [part])]
        one = matcher.deep_copy()
        matches = all(
            one.compute_bitmask()[token >> 3] >> (token & 7) & 1 and one.consume_token(token) for token in tokens
        )
        assert (matches and one.is_accepting()) == expected, parts


@pytest.mark.parametrize(("grammar", "num_lexemes"), [(JSON, 3), (XML, 2), ("root ::= a+\na ::= [a-z] ','?", 0)])
def test_rules_that_end_unambiguously_remain_whole(grammar: str, num_lexemes: int) -> None:
    """If rules were split into single characters, masks would take hundreds of times as long."""
    lark = to_lark(grammar.replace("'", '"'), {})
    assert sum(line.startswith("R") for line in lark.splitlines()) == (num_lexemes or 1)


def test_long_text_is_not_ambiguous(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = compile_guide(Guide("ebnf", XML), tokenizer)
    tokens = tokenizer.tokenize_str("<a>" + "some words " * 1000 + "<b>and</b> more</a>")
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


# Node of a random grammar: the kind, followed by its parts.
Node = tuple[Any, ...]


def random_node(draw: random.Random, names: list[str], depth: int) -> Node:
    kind = draw.choice(["literal", "class", "rule", "all", "any", "repeat"][: 6 if depth else 2])
    if kind == "literal":
        return kind, "".join(draw.choices(LETTERS, k=draw.randrange(4)))
    if kind == "class":
        return kind, "".join(draw.sample(LETTERS, draw.randrange(1, 4))), draw.random() < 0.2
    if kind == "rule":
        return kind, draw.choice(names)
    if kind == "repeat":
        return kind, random_node(draw, names, depth - 1), *draw.choice([(0, 9), (1, 9), (0, 1), (2, 2), (1, 2)])
    return kind, [random_node(draw, names, depth - 1) for _ in range(draw.randrange(1, 4))]


def written(node: Node) -> str:
    kind, part, *rest = node
    if kind == "literal":
        return f'"{part}"'
    if kind == "class":
        return f"[{'^' if rest[0] else ''}{part}]"
    if kind == "repeat":
        return f"{written(part)}{{{rest[0]},{'' if rest[1] == 9 else rest[1]}}}"
    return part if kind == "rule" else f"({(' | ' if kind == 'any' else ' ').join(map(written, part))})"


def ends(node: Node, text: str, start: int, known: dict[tuple[str, int], set[int]]) -> set[int]:
    """Return the positions at which matches of a node that begin at `start` end; `known` has the ends of the matches of
    rules.
    """
    kind, part, *rest = node
    if kind == "literal":
        return {start + len(part)} if text.startswith(part, start) else set()
    if kind == "class":
        return {start + 1} if start < len(text) and (text[start] in part) != rest[0] else set()
    if kind == "rule":
        return known[part, start]
    if kind == "any":
        return set().union(*(ends(item, text, start, known) for item in part))
    found, ended = {start}, {start} if kind == "repeat" and rest[0] == 0 else set()
    for number, item in enumerate(part if kind == "all" else [part] * rest[1], 1):
        found = {end for place in found for end in ends(item, text, place, known)}
        ended |= found if kind == "repeat" and number >= rest[0] else set()
    return found if kind == "all" else ended


def is_in_language(rules: dict[str, Node], text: str) -> bool:
    known: dict[tuple[str, int], set[int]] = {(name, start): set() for name in rules for start in range(len(text) + 1)}
    while True:
        found = {(name, start): ends(rules[name], text, start, known) for name, start in known}
        if found == known:
            return len(text) in known["root", 0]
        known = found


@pytest.mark.parametrize("seed", range(12))
def test_random_grammars_match_exactly_their_language(matches: Matches, seed: int) -> None:
    draw = random.Random(seed)
    names = ["root", "one", "two"]
    rules = {name: random_node(draw, names, 3) for name in names}
    grammar = "\n".join(f"{name} ::= {written(node)}" for name, node in rules.items())
    expected = {text: is_in_language(rules, text) for text in draw.sample(TEXTS, 20)}
    if any(expected.values()):
        assert {text: matches(grammar, text) for text in expected} == expected
