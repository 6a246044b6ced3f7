"""The ``regrow`` command: ``run`` starts a job; ``report``, ``explain``, ``profile``, ``checkpoints`` tell of one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from regrow.rules import Source


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit code (2: the command line is wrong, as argparse has it)."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="regrow", description="Distributed training that heals in place.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("run", add_help=False, help="start a training script on this host (torchrun's flags and more)")
    report = commands.add_parser("report", help="print what failed in a run, what was done, and how long it took")
    report.add_argument("directory", metavar="DIR", help="the run's log directory")
    explain = commands.add_parser(
        "explain",
        help="make past decisions of a run again: what it could be healed from, and why it took what it took",
        description="Make the decisions of a run again, with the planner that is installed, from what was held then. "
        "Prints each source that there was, the time that was expected of it and how that was made up; and whether "
        "the decision is the same.",
    )
    explain.add_argument("events", metavar="EVENTS", help="the run's log directory, or one of its events files")
    explain.add_argument("--generation", type=int, metavar="N", help="only this one")
    explain.add_argument(
        "--force",
        choices=[source.value for source in Source],
        help="what would have been done with --force-source SOURCE",
    )
    profile = commands.add_parser(
        "profile",
        help="make the profile that `plan logging` reads, from the events of a pipeline run",
        description="Make the profile that `regrow plan logging` reads, from the events of a pipeline run that has "
        "ended or goes on. replay_s of a machine is the time that its stages compute in a step, added up, times half "
        "of checkpoint_every: a failure comes, on average, in the middle between two checkpoints. Waiting for messages "
        "does not count, nor do replayed steps and the first two.",
    )
    profile.add_argument("directory", metavar="DIR", help="the run's log directory")
    profile.add_argument("--output", metavar="JSON", help="write the profile to this file instead of printing it")
    profile.add_argument(
        "--per",
        choices=["rank", "host"],
        help="what a machine is: each rank (all ranks of a stage, if it has replicas), or each host; host unless all "
        "ranks are on one",
    )
    profile.add_argument("--bandwidth", metavar="SIZE", help="bytes a second between machines, instead of the measured")
    profile.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="steps between checkpoints, if not as in the run"
    )
    checkpoints = commands.add_parser("checkpoints", help="list and verify the checkpoints of a job")
    checkpoints.add_argument("directory", metavar="DIR", help="what was given to --ckpt-dir")
    checkpoints.add_argument("--no-verify", action="store_true", help="do not read them whole to compare checksums")
    plans = commands.add_parser("plan", help="choose settings before a run").add_subparsers(
        dest="what", metavar="WHAT", required=True
    )
    logging = plans.add_parser("logging", help="which machines of a pipeline to recover together, under a storage cap")
    logging.add_argument("profile", metavar="PROFILE", help="JSON, as `regrow profile` writes it")
    logging.add_argument("--cap", required=True, metavar="SIZE", help="what all journals may take, like 200GB")
    logging.add_argument("--plot", metavar="PNG", help="draw the frontier into this file")
    placement = plans.add_parser(
        "placement",
        help="which hosts to keep whose in-memory snapshots on",
        description="Say which hosts would keep whose in-memory snapshots, how likely all survive the loss of some "
        "hosts, and what memory they take.",
    )
    placement.add_argument("--hosts", type=int, required=True, metavar="N", help="how many there are")
    placement.add_argument(
        "--copies", type=int, required=True, metavar="M", help="of each host's snapshots, its own included"
    )
    placement.add_argument(
        "--domain-of", metavar="NAMES", help="what each host fails together with, such as its rack, in order: a,a,b,b"
    )
    placement.add_argument("--state", metavar="SIZE", help="what the workers of one host have to keep, like 60GB")
    placement.add_argument("--memory", metavar="SIZE", help="what a host has for them; too little is refused")
    placement.add_argument(
        "--losses", type=int, metavar="K", help="how many lost hosts to compute for (twice the copies, at least 4)"
    )
    try:
        if words[:1] == ["run"]:
            from regrow.agent.agent import run
            from regrow.agent.command_line import parse

            return run(parse(words[1:]))
        args = parser.parse_args(words)
        if args.command == "report":
            from regrow.report import print_report

            return print_report(args.directory)
        if args.command == "explain":
            from regrow.explain import print_decisions

            return print_decisions(args)
        if args.command == "profile":
            from regrow.profile import print_profile

            try:
                return print_profile(args)
            except ValueError as error:
                profile.error(str(error))
        if args.command == "checkpoints":
            from regrow.checkpoints import print_checkpoints

            try:
                return print_checkpoints(args)
            except ValueError as error:
                checkpoints.error(str(error))
        if args.command == "plan" and args.what == "placement":
            from regrow.placement_plan import plan_placement

            try:
                return plan_placement(args)
            except ValueError as error:
                placement.error(str(error))
        if args.command == "plan":
            from regrow.logging_plan import plan_logging

            try:
                return plan_logging(args)
            except ValueError as error:
                logging.error(str(error))
        parser.print_help()
    except SystemExit as error:  # argparse's way to end
        return error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads our output (head, less) has seen enough
        sys.stderr.close()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
