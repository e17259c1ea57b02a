"""A ramp in steps, to see where a fleet bends:

    locust -f loadtest/locustfile.py,loadtest/locust_steps.py --host http://127.0.0.1:8080 --steps 10,20,40 --step-s 60

Each number of users is held for --step-s seconds (the ramp up to it included, at -r users a second), then the test
ends; -u is not used. Read the plateaus in the charts, or in --csv FILE --csv-full-history.
"""

from __future__ import annotations

from argparse import ArgumentParser

from locust import LoadTestShape, events


@events.init_command_line_parser.add_listener
def add_flags(parser: ArgumentParser) -> None:
    steps = parser.add_argument_group("Steps")
    steps.add_argument("--steps", type=checked_steps, default="5,10,20,40", help="Users of each step")
    steps.add_argument("--step-s", type=float, default=60.0, help="Seconds of each step")


def users_at(run_time_s: float, steps: list[int], step_s: float) -> int | None:
    """Users of the step that is on; None after the last one."""
    number = int(run_time_s / step_s)
    return steps[number] if number < len(steps) else None


def parse_steps(text: str) -> list[int]:
    """ValueError for what is no list of numbers from 1."""
    steps = [int(part) for part in text.split(",")]
    if min(steps) < 1:
        raise ValueError(f"--steps {text}: each step has at least one user")
    return steps


def checked_steps(text: str) -> str:
    """An argument's type. It stays text, which the web UI can show."""
    parse_steps(text)
    return text


class Steps(LoadTestShape):
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        users = users_at(self.get_run_time(), parse_steps(options.steps), options.step_s)
        return None if users is None else (users, options.spawn_rate or 1.0)
