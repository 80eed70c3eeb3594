"""`python -m example_project.payments serve | place`: the service, and traffic for it."""

import argparse
import asyncio
import json

from example_project.payments.payers import make_payments


def main() -> None:
    """Run one command."""
    arguments = _parser().parse_args()
    if arguments.command == "serve":
        import uvicorn

        uvicorn.run("example_project.payments.app:app", host=arguments.host, port=arguments.port)
        return
    tally = asyncio.run(
        make_payments(
            arguments.count,
            concurrency=arguments.concurrency,
            rollback_share=arguments.rollback_share,
            rate=arguments.rate,
        )
    )
    print(json.dumps(vars(tally)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m example_project.payments", description="A payment service.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve HTTP")
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    serve.add_argument("--port", type=int, default=8001, help="default: %(default)s")
    place = commands.add_parser(
        "place",
        help="make payments from many sessions, some of which roll back; prints what was done, as one line of JSON",
    )
    place.add_argument("--count", type=int, default=100, help="payments that commit (default: %(default)s)")
    place.add_argument("--concurrency", type=int, default=8, help="sessions (default: %(default)s)")
    place.add_argument(
        "--rollback-share", type=float, default=0.05, help="transactions that roll back (default: %(default)s)"
    )
    place.add_argument("--rate", type=float, help="payments per second at most (default: no limit)")
    return parser


if __name__ == "__main__":
    main()
