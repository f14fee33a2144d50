"""The options of `vllm bench serve`."""

from __future__ import annotations

import argparse

from vllm.utils.argument_parser import FlexibleArgumentParser, parse_positive

METRICS = ("ttft", "tpot", "itl", "e2el")


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r}: known are {', '.join(METRICS)}")
    return names


def _ranks(text: str) -> tuple[float, ...]:
    try:
        ranks = tuple(float(rank) for rank in text.split(","))
    except ValueError:
        ranks = (-1.0,)
    if not all(0 <= rank <= 100 for rank in ranks):
        raise argparse.ArgumentTypeError(f"expected percentiles from 0 to 100, got {text!r}")
    return ranks


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, or inf, got {text!r}")
    return rate


GOALS = ("ttft", "tpot", "e2el")
"""Times of one request that --goodput may limit."""


class _Goals(argparse.Action):
    """Collects METRIC:MILLISECONDS pairs."""

    def __call__(  # type: ignore[no-untyped-def]
        self, parser, namespace, values, option_string=None
    ) -> None:
        goals: dict[str, float] = {}
        for text in values:
            name, _, limit = text.partition(":")
            try:
                goals[name] = float(limit)
            except ValueError:
                goals[name] = -1.0
            if name not in GOALS or not goals[name] > 0:
                parser.error(
                    f"{option_string}: expected METRIC:MILLISECONDS with one of "
                    f"{', '.join(GOALS)}, got {text!r}"
                )
        setattr(namespace, self.dest, goals)


class _Metadata(argparse.Action):
    """Collects K=V pairs."""

    def __call__(  # type: ignore[no-untyped-def]
        self, parser, namespace, values, option_string=None
    ) -> None:
        pairs = [text.partition("=") for text in values]
        if not all(equals for _, equals, _ in pairs):
            parser.error(f"{option_string}: expected KEY=VALUE, got {' '.join(values)}")
        setattr(namespace, self.dest, {key: value for key, _, value in pairs})


def make_parser() -> FlexibleArgumentParser:
    """Return the parser."""
    parser = FlexibleArgumentParser(
        prog="vllm bench serve",
        description="Measure latencies and throughput of a running server under a given load.",
    )
    _add_server_args(parser)
    _add_load_args(parser)
    _add_result_args(parser)
    _add_dataset_args(parser)
    return parser


def _add_server_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=["vllm", "openai", "openai-chat", "lmdeploy", "scalellm", "sglang"],
        default="vllm",
        help="openai-chat sends conversations, all others text completions in OpenAI's form",
    )
    group.add_argument("--base-url", default=None, help="in place of host and port")
    group.add_argument("--host", default="localhost", help="host of the server")
    group.add_argument("--port", type=int, default=8000, help="port of the server")
    group.add_argument("--endpoint", default="/v1/completions", help="path of the endpoint")
    group.add_argument("--model", required=True, help="model that is served; its tokenizer is used")
    group.add_argument("--served-model-name", default=None, help="name in requests (the model)")
    group.add_argument("--tokenizer", default=None, help="tokenizer, if not the model's")
    group.add_argument("--trust-remote-code", action="store_true", help="for the tokenizer")


def _add_load_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=parse_positive, default=1000, help="requests")
    group.add_argument(
        "--request-rate",
        type=_rate,
        default=float("inf"),
        help="requests per second, as a Poisson process; inf sends all at once",
    )
    group.add_argument(
        "--max-concurrency",
        type=parse_positive,
        default=None,
        help="most requests at a time; no limit if unset",
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and times")
    group.add_argument(
        "--best-of", type=parse_positive, default=1, help="answers generated for each prompt"
    )
    group.add_argument(
        "--use-beam-search", action="store_true", help="beam search of width best_of"
    )
    group.add_argument("--logprobs", type=int, default=None, help="alternatives for each token")
    group.add_argument("--ignore-eos", action="store_true", help="generate to the full length")
    group.add_argument("--profile", action="store_true", help="call /start_profile, /stop_profile")


def _add_result_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--result-dir", default=None, help="folder of the file")
    group.add_argument("--result-filename", default=None, help="name of the file")
    group.add_argument(
        "--metadata",
        nargs="+",
        action=_Metadata,
        default={},
        metavar="KEY=VALUE",
        help="added to the file",
    )
    group.add_argument(
        "--percentile-metrics",
        dest="selected_metrics",
        type=_metrics,
        default=("ttft", "tpot", "itl"),
        help=f"comma list of {', '.join(METRICS)}",
    )
    group.add_argument(
        "--metric-percentiles",
        dest="ranks",
        type=_ranks,
        default=(99.0,),
        help="comma list of percentiles",
    )
    group.add_argument(
        "--goodput",
        dest="goals",
        nargs="+",
        action=_Goals,
        default={},
        metavar="METRIC:MS",
        help=f"count requests a second within all of these limits ({', '.join(GOALS)})",
    )


def _add_dataset_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset-name", choices=["sharegpt", "sonnet", "random"], default="sharegpt", help="kind"
    )
    group.add_argument("--dataset-path", default=None, metavar="FILE", help="file")
    group.add_argument("--dataset", default=None, metavar="FILE", help="old name of --dataset-path")
    group.add_argument(
        "--sharegpt-output-len", type=parse_positive, default=None, help="tokens to generate"
    )
    for name, default in (("input", 550), ("output", 150), ("prefix", 200)):
        group.add_argument(f"--sonnet-{name}-len", type=int, default=default, help="tokens")
    for name, default in (("input", 1024), ("output", 128), ("prefix", 0)):
        group.add_argument(f"--random-{name}-len", type=int, default=default, help="tokens")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=1.0,
        help="lengths are drawn from ratio*length to length",
    )
