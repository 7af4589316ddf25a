"""Scripts over the library: sweeps and their reports, benchmarks, comparisons. Each explains itself with --help."""

import importlib.util
import sys

_MISSING = [name for name in ("matplotlib", "rich", "submitit", "tabulate") if importlib.util.find_spec(name) is None]
if _MISSING:
    print(f"experiments: {' and '.join(_MISSING)} missing; pip install -e '.[experiments]'", file=sys.stderr)
    raise SystemExit(2)
