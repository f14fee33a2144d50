"""The patch queue: what turns the base engine into the fork, kept rebaseable.

`python -m tools.pq` has the verbs. The tree in place is the truth for reading and building; the
series under `patches/` is the truth for rebasing; `verify` holds them together by tree ids.
"""
