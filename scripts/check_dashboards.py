"""Hold the dashboards' JSON to the types that Grafana publishes for the pinned version (``make dashboards``).

npm is needed, and a network that reaches its registry; without them nothing is checked, which is said.

Each file becomes a TypeScript literal of the types of ``@grafana/schema``: an unknown property, a wrong type, or a word
that an option doesn't know is an error of the compiler. That is as near as one gets to a Grafana without running it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT_S = 300
TYPESCRIPT = "typescript@5.9"
_TYPES = "./node_modules/@grafana/schema/dist/types/raw"
HEAD = (
    f"""\
import type * as raw from '{_TYPES}/dashboard/x/types.gen';
import type * as timeseries from '{_TYPES}/composable/timeseries/panelcfg/x/types.gen';
import type * as stat from '{_TYPES}/composable/stat/panelcfg/x/types.gen';
import type * as heatmap from '{_TYPES}/composable/heatmap/panelcfg/x/types.gen';
"""
    """\
// In JSON an enumeration's member is its value.
type Json<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
type Field<T> = Omit<raw.FieldConfig, 'custom'> & { custom?: Partial<T> };
// Prometheus' queries are not among the published types: these are the fields that its plugin documents.
type Target = {
  refId: string; expr: string; legendFormat: string; exemplar: boolean; instant: boolean; range: boolean;
  format: 'time_series' | 'heatmap' | 'table';
};
type Shown<O, F> = Omit<raw.Panel, 'options' | 'fieldConfig' | 'targets'> & {
  options: Partial<O>; targets: Target[];
  fieldConfig: { defaults: Field<F>; overrides: raw.FieldConfigSource['overrides'] };
};
type Board = Json<Omit<raw.Dashboard, 'panels'>>;
"""
)


def literals(board: dict[str, object], name: str) -> str:
    """Return a dashboard as declarations."""
    panels = board.pop("panels")
    assert isinstance(panels, list)  # noqa: S101 - as it was built
    lines = [f"export const {name}: Board = {json.dumps(board)};"]
    for place, panel in enumerate(panels):
        kind = panel["type"]
        shape = {
            "row": "raw.RowPanel",
            "timeseries": "Shown<timeseries.Options, timeseries.FieldConfig>",
            "stat": "Shown<stat.Options, {}>",
            "heatmap": "Shown<heatmap.Options, heatmap.FieldConfig>",
        }[kind]
        lines.append(f"export const {name}_{place}: Json<{shape}> = {json.dumps(panel)};")
    return "\n".join(lines)


def unchecked(why: str) -> int:
    """Say that nothing was checked; that is no failure of the dashboards."""
    sys.stdout.write(f"dashboards: {why}, so their JSON is not held to Grafana's types\n")
    return 0


def main() -> int:
    """Return 0 when the compiler finds nothing."""
    from dashboards.render import GRAFANA

    npm = shutil.which("npm")
    if npm is None:
        return unchecked("npm is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "package.json").write_text('{"private": true}')
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", f"@grafana/schema@{GRAFANA}", TYPESCRIPT]
        if subprocess.run(install, cwd=folder, check=False, timeout=LIMIT_S).returncode:
            asked = [npm, "view", "--silent", "npm", "version"]
            reached = subprocess.run(asked, cwd=folder, check=False, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
            return 1 if reached.returncode == 0 else unchecked("npm does not reach its registry")
        boards = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
        texts = [literals(json.loads(each.read_text()), each.stem.replace("-", "_")) for each in boards]
        (folder / "boards.ts").write_text(HEAD + "\n".join(texts) + "\n")
        compiler = ["node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler"]
        options = ["--module", "esnext", "--target", "esnext", "boards.ts"]
        code = subprocess.run([*compiler, *options], cwd=folder, check=False, timeout=LIMIT_S).returncode
    if code == 0:
        sys.stdout.write(f"dashboards: {len(boards)} files are as the types of Grafana {GRAFANA} want them\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
