"""Ask a Prometheus for every panel of the dashboard.

    python deploy/grafana/check_dashboard.py URL

Prints how many series each query has now, and ends with status 1 where one is refused. A query
without series is no fault: nothing of its kind has happened. With `--as-rules` in place of the URL
it writes the queries as recording rules, which `promtool check rules` reads without a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

DASHBOARD = Path(__file__).parent / "dashboards" / "parrot-gateway.json"
#: Grafana's variables as they are with everything chosen.
VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*", "$job": ".*"}


def expressions(dashboard: Path) -> Iterator[tuple[str, str]]:
    """The title of each panel and its queries, with the variables' values."""
    for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            expression: str = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


def query(url: str, expression: str) -> list[dict[str, object]]:
    """The series of an instant query.

    Raises:
        ValueError: Prometheus refuses it.
    """
    try:
        with urlopen(f"{url}/api/v1/query?{urlencode({'query': expression})}") as answer:  # noqa: S310
            found: list[dict[str, object]] = json.load(answer)["data"]["result"]
            return found
    except HTTPError as error:
        raise ValueError(json.load(error)["error"]) from None


def as_rules() -> str:
    """A file of rules, one for each query."""
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (_, expression) in enumerate(expressions(DASHBOARD))
    ]
    # JSON is YAML too.
    return json.dumps({"groups": [{"name": "panels", "rules": rules}]})


def main() -> int:
    """Ask for all panels."""
    if sys.argv[1] == "--as-rules":
        print(as_rules())
        return 0
    url, refused, empty = sys.argv[1].rstrip("/"), 0, 0
    for title, expression in expressions(DASHBOARD):
        try:
            series = len(query(url, expression))
        except ValueError as error:
            refused += 1
            print(f"REFUSED  {title}: {error}\n         {expression}")
            continue
        empty += not series
        print(f"{series:7}  {title}" + ("" if series else f"\n         {expression}"))
    print(f"{refused} refused, {empty} without series")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
