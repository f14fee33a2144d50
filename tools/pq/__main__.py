"""`python -m tools.pq VERB`: import, export, verify, refresh, add, rebase, report, base."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.pq import verbs
from tools.pq.git_store import GitError
from tools.pq.patch_file import PatchError
from tools.pq.queue_tree import QueueError

_HEAD = "read the last commit, not the files in place"
ROOT = Path(__file__).resolve().parents[2]


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.pq", description=__doc__)
    sub = parser.add_subparsers(dest="verb", required=True)
    command = sub.add_parser("verify", help="check that base, series and tree agree, by tree id")
    command.add_argument("--head", action="store_true", help=_HEAD)
    command = sub.add_parser("import", help="make a branch with a commit for each patch")
    command.add_argument("--branch")
    command = sub.add_parser("export", help="write the series in canonical form")
    command.add_argument("--check", action="store_true", help="only say whether it is")
    command.add_argument("--branch", help="take the patches from the commits of this branch")
    command = sub.add_parser("refresh", help="take edits of the working tree into patches")
    command.add_argument("names", nargs="*", metavar="PATCH")
    command.add_argument("--base", action="store_true", help="also record an edited base")
    command.add_argument("--head", action="store_true", help=_HEAD)
    command = sub.add_parser("add", help="make a new patch of edits since the last commit")
    command.add_argument("name", help="NNNN-concern; its number says where in the series")
    command.add_argument("paths", nargs="+", metavar="PATH")
    command.add_argument("-F", "--file", type=Path, required=True, help="subject, why, trailers")
    command = sub.add_parser("rebase", help="try the series on another base")
    command.add_argument("--onto", required=True, metavar="REVISION")
    command.add_argument("--json", action="store_true")
    command.add_argument("--branch", help="write the result to this branch")
    command = sub.add_parser("report", help="one row a patch")
    command.add_argument("--json", action="store_true")
    command = sub.add_parser("base", help="write the base tree into a folder")
    command.add_argument("folder", type=Path)
    command.add_argument("--head", action="store_true", help=_HEAD)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    args = make_parser().parse_args(argv)
    actions = {
        "verify": lambda: verbs.verify(ROOT, head=args.head),
        "import": lambda: verbs.import_series(ROOT, args.branch),
        "export": lambda: verbs.export(ROOT, check=args.check, branch=args.branch),
        "refresh": lambda: verbs.refresh(ROOT, args.names, base=args.base, head=args.head),
        "add": lambda: verbs.add(ROOT, args.name, args.file.read_text(), args.paths),
        "rebase": lambda: verbs.rebase(ROOT, args.onto, as_json=args.json, branch=args.branch),
        "report": lambda: verbs.report(ROOT, as_json=args.json),
        "base": lambda: verbs.checkout_base(ROOT, args.folder, head=args.head),
    }
    try:
        return actions[args.verb]()
    except (GitError, PatchError, QueueError) as error:
        print(f"pq {args.verb}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
