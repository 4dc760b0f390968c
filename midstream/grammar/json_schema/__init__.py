"""Converts JSON schemas to grammars, exactly: what a schema restricts and a grammar cannot express is refused by name.

1. `document.py` reads the schema, with exact numbers, and resolves references.
2. `conjunction.py` collects what several schemas that apply to the same value demand of it.
3. `rules.py` writes the rules of each such value; `objects.py` and `arrays.py` those of its members; `numbers.py`,
   `strings.py`, `patterns.py` and `formats.py` its terminals.
4. `grammar.py` removes what can never be completed, so that the output cannot run into a dead end, and writes Lark.
"""
