"""The limit on this process's open files, which also limits its connections."""

from __future__ import annotations

import resource

# More than any process needs, but low enough that closing all descriptors after a fork is quick.
_ENOUGH = 65_536


def raise_open_files_limit() -> int:
    """Raise the soft limit on open files, which is often 1,024, to the hard limit; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
