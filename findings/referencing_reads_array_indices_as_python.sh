#!/bin/sh
# `referencing`, with which jsonschema resolves `$ref`, reads array indices of JSON pointers as Python does.
#
# Guess before the run: RFC 6901 allows only 0 and numbers without a sign and a leading zero, so that references such as
# `#/anyOf/-1` and `#/anyOf/01` lead nowhere.
# Seen with referencing 0.37.0 and jsonschema 4.26.0: `-1` is the last element, and `01` and `+1` are the second one;
# jsonschema validates with such references. An index beyond the end leads nowhere. jsonschema-rs 0.46.5 refuses only
# `-1`.
#
# Needs python3. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet referencing==0.37.0 jsonschema==4.26.0 jsonschema-rs==0.46.5
"$folder/venv/bin/python" - <<'END'
import jsonschema
import jsonschema_rs


def schema(index):
    choice = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"c": choice},
            "$ref": f"#/$defs/c/anyOf/{index}"}


def accepted(index):
    try:
        check = jsonschema.Draft202012Validator(schema(index)).is_valid
        return [value for value in ("a", 1, True) if check(value)]
    except Exception as error:
        return type(error).__name__


def accepted_by_rust(index):
    try:
        return [value for value in ("a", 1, True) if jsonschema_rs.validator_for(schema(index)).is_valid(value)]
    except Exception as error:
        return type(error).__name__


found = {index: (accepted(index), accepted_by_rust(index)) for index in ("1", "-1", "01", "+1", "3")}
print(found)
assert found["1"] == ([1], [1]), found
assert found["-1"][0] == [True], found
assert found["01"][0] == found["+1"][0] == [1], found
assert found["3"][0] == "_WrappedReferencingError", found
assert found["01"][1] == found["+1"][1] == [1], found
assert found["-1"][1] == found["3"][1] == "ValidationError", found
END
