"""Schemathesis over the admin API as its OpenAPI document describes it: no answer but a described one, no 500 ever.

It runs as a process of its own, as a user would run it; its plug-in for pytest and its warnings stay out of the suite.
"""

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import running_fleet

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
@pytest.mark.parametrize(
    ("phases", "examples"),
    [("examples,fuzzing", 3), pytest.param("examples,coverage,fuzzing", 10, marks=pytest.mark.slow)],
    ids=["quick", "full"],
)
@pytest.mark.timeout(1800)
async def test_every_answer_of_the_admin_api_is_one_that_is_described(
    tmp_path: Path, phases: str, examples: int
) -> None:
    async with running_fleet(tmp_path / "state", admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{fleet.gateway.url}/openapi.json", "--url", fleet.gateway.url),
            *("--include-path-regex", "^/admin/v1/", "--checks", CHECKS, "--phases", phases),
            *("--max-examples", str(examples), "--seed", "7"),
            *("--workers", "1", "--no-color", "--request-timeout", "60"),
            *("-H", f"Authorization: Bearer {ADMIN_KEY}"),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), 1500)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode(errors="replace")[-6000:]
        assert (await admin.call("GET", "/tenants"))[0] == 200
