"""Helm's library, asked in a process of its own by ``helm``; run by path.

In comes a JSON object, ``chart`` and a list of ``values``; out comes one, what the linter found
(``lint``) and for each of the values the ``text`` that the chart makes of them, or the
``refusal``.
"""

import json
import sys

import helm_python


def main() -> None:
    """Answer what stands on standard input."""
    asked = json.load(sys.stdin)
    told = helm_python.lint(asked["chart"], strict=True)
    findings = [f"{each['path']}: {each['error']}" for each in told["messages"]
                if each["severity"] > 1]  # fmt: skip
    lint = findings or told["errors"]
    rendered = [_rendered(asked["chart"], each) for each in asked["values"]] if not lint else []
    json.dump({"lint": lint, "rendered": rendered}, sys.stdout)


def _rendered(path: str, values: dict[str, object]) -> dict[str, str]:
    try:
        with helm_python.Chart.load(path) as chart:
            chart.validate_schema(values)
            made = chart.render(values, name=chart.name, namespace="default")
    except helm_python.HelmError as error:
        return {"text": "", "refusal": str(error)}
    parts = [made[name].strip() for name in sorted(made) if not name.endswith("NOTES.txt")]
    return {"text": "".join(f"---\n{part}\n" for part in parts if part), "refusal": ""}


if __name__ == "__main__":
    main()
