"""Expressions of the formats of strings that are enforced; other formats are annotations, as the standard says.

None of these texts has a character that JSON escapes. Sources: RFC 3339 (dates, times, durations), RFC 5321 (email),
RFC 1123 (hostname), RFC 4291 (ipv6), RFC 3986 (uri), RFC 9562 (uuid).
"""

from __future__ import annotations

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOURS_AND_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_AND_MINUTES}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOURS_AND_MINUTES})"
# Programs limit the numbers of durations, which the standard does not.
_NUMBER = "[0-9]{1,4}"
_SECONDS = f"{_NUMBER}S"
_MINUTES = f"{_NUMBER}M({_SECONDS})?"
_CLOCK = f"T({_SECONDS}|{_MINUTES}|{_NUMBER}H({_MINUTES})?)"
_DAYS = f"{_NUMBER}D"
_MONTHS = f"{_NUMBER}M({_DAYS})?"
_DURATION = f"P({_NUMBER}W|({_DAYS}|{_MONTHS}|{_NUMBER}Y({_MONTHS})?)({_CLOCK})?|{_CLOCK})"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,2}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = f"({_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    (
        f"({_H16}:){{6}}{_LS32}",
        f"::({_H16}:){{5}}{_LS32}",
        f"({_H16})?::({_H16}:){{4}}{_LS32}",
        *(f"(({_H16}:){{0,{n}}}{_H16})?::({_H16}:){{{3 - n}}}{_LS32}" for n in (1, 2)),
        f"(({_H16}:){{0,3}}{_H16})?::{_LS32}",
        f"(({_H16}:){{0,4}}{_H16})?::{_H16}",
        f"(({_H16}:){{0,5}}{_H16})?::",
    )
)
_UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_PCHAR = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(//({_HOSTNAME}|{_IPV4})(:[0-9]{{1,5}})?(/{_PCHAR}*)*|{_PCHAR}+(/{_PCHAR}*)*)"
    rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": f"({_IPV6})",
    "uri": _URI,
    "uuid": _UUID,
    # As pydantic names the format of version 4.
    "uuid4": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}",
}
