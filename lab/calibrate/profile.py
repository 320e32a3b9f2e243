"""``python -m lab.calibrate.profile PROFILE``: fit a profile's measurements again, and say how far off the model is."""

import argparse
import sys
from dataclasses import asdict

from engines.sim.profile import ProfileError, load_profile, shipped
from lab.calibrate.fit import errors, refit


def main(arguments: list[str] | None = None) -> int:
    """Print coefficients as a profile has them, and the errors; 1 where a profile's own are others."""
    parser = argparse.ArgumentParser(prog="python -m lab.calibrate.profile", description=__doc__)
    parser.add_argument("profile", help=f"a file, or one of {', '.join(shipped())}")
    chosen = parser.parse_args(arguments)
    try:
        profile = load_profile(chosen.profile)
        most = profile.engine.max_prefill_tokens
        model = refit(profile)
    except ProfileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    lines = ["[time]", *(f"{name} = {value!r}" for name, value in asdict(model).items()), ""]
    for kind, off in errors(model, profile.measured, max_prefill_tokens=most).items():
        lines.append(f"# {kind}: {off.measurements} measured, {off.mean:.1%} off on average, {off.worst:.1%} at worst")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if model == profile.time else 1


if __name__ == "__main__":
    sys.exit(main())
