"""The files in deploy/: well formed, without root and secrets, with health checks; scripts and units fit together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.dockerfile import Stage, lineage, stages

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STAGES = stages(DEPLOY / "Dockerfile")
PARTS = ("tracker", "server", "node")
UNITS = {"niss-tracker": "tracker", "niss-superlink": "server", "niss-node": "node"}
KNOWN = {"ARG", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER", "WORKDIR"}
_NEEDED = re.compile(r"\$\{(NISS_[A-Z]+):\?")


def needed(part: str) -> set[str]:
    """The settings without which a script does not start."""
    return set(_NEEDED.findall((DEPLOY / "run" / part).read_text()))


def whole(name: str) -> Stage:
    """A stage with everything that it inherits."""
    parts = lineage(name, STAGES)
    return Stage(name, parts[0].base, [one for part in parts for one in part.instructions])


def test_each_part_has_an_image_and_the_instructions_are_known():
    assert set(PARTS) <= set(STAGES)
    for stage in STAGES.values():
        for word, rest in stage.instructions:
            assert word in KNOWN, (stage.name, word)
            assert rest
        base = stage.base
        assert base in STAGES or re.fullmatch(r"python:\$\{PYTHON\}-slim", base), "an image with a tag"


@pytest.mark.parametrize("part", PARTS)
def test_an_image_runs_without_root_and_says_how_it_is(part):
    image = whole(part)
    user = image.last("USER")
    assert user is not None
    assert user.split(":")[0] not in ("root", "0")
    assert user.split(":")[0].isdecimal(), "a number: `runAsNonRoot` and volumes know no names"
    words = [word for word, _ in image.instructions]
    assert "RUN" not in words[words.index("USER") :], "nothing is installed by the user that runs it"
    health = image.last("HEALTHCHECK")
    assert health is not None
    assert f'"{part}"' in health
    entry = json.loads(image.last("ENTRYPOINT") or "")
    assert entry == [f"/opt/run/{part}"]
    assert (DEPLOY / "run" / part).stat().st_mode & 0o111 == 0o111
    assert "/opt/niss/bin" in " ".join(image.all("ENV"))


def test_what_is_copied_exists_and_is_let_through_and_nothing_else_is():
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert allowed[1] == "*", "everything is left out but what is named"
    named = {line[1:] for line in allowed if line.startswith("!")}
    for stage in STAGES.values():
        for copied in stage.all("COPY"):
            words = copied.split()
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in STAGES
                continue
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == one or source.startswith(f"{one}/") for one in named), source
    for one in named:
        assert (ROOT / one).exists(), one


def test_nothing_secret_is_built_in():
    for stage in STAGES.values():
        for word, rest in stage.instructions:
            if word in ("ARG", "ENV", "LABEL"):
                assert not re.search(r"(?i)secret|password|token|private|_key\b", rest), rest
            if word == "COPY":
                assert not re.search(r"\.(key|pem|crt|env)\b", rest), rest


def test_pip_is_told_what_to_install_and_keeps_no_cache():
    commands = [rest for stage in STAGES.values() for rest in stage.all("RUN") if re.search(r"\bpip\b", rest)]
    assert len(commands) == 3
    for command in commands:
        assert "--no-cache-dir" in command
        assert "--constraint /opt/constraints.txt" in command or "wheel --no-cache-dir --no-deps" in command


def test_compose_has_each_part_closed_off_and_in_a_profile_of_its_own():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == set(PARTS)
    for part, service in compose["services"].items():
        assert service["profiles"] == [part], "no machine starts another one's part"
        build = service["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert build["target"] == part
        arguments = {name for stage in lineage(part, STAGES) for name in stage.all("ARG")}
        assert set(build.get("args", {})) == {one.partition("=")[0] for one in arguments}
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "privileged" not in service
        assert not service["user"].startswith(("0", "root"))
        assert service["volumes"] == ["${NISS_FOLDER:-./niss}:/niss"]
        ports = {one.partition(":")[2] for one in service.get("ports", [])}
        assert ports == set(whole(part).all("EXPOSE"))
        asked = needed(part) - {"NISS_FOLDER"}
        assert asked <= set(service["environment"]), "the script asks for it, and compose does not pass it on"


@pytest.mark.parametrize("part", PARTS)
def test_a_script_is_one_for_sh_and_starts_nothing_without_its_settings(part, tmp_path):
    script = DEPLOY / "run" / part
    assert script.read_text().startswith("#!/bin/sh\n")
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, script], check=True)
    subprocess.run(["sh", "-n", script], check=True)
    # Stand-ins for the programs: what is tested is that the script does not get so far.
    for program in ("niss", "flower-superlink", "flower-supernode"):
        (tmp_path / program).write_text("#!/bin/sh\necho started\n")
        (tmp_path / program).chmod(0o755)
    for name in ("server.pub", "holder.pub"):
        (tmp_path / name).write_text("00")
    settings = dict.fromkeys(needed(part), "1") | {"NISS_FOLDER": str(tmp_path)}
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([script], env=path | settings, capture_output=True, text=True, check=True)
    assert done.stdout == "started\n"
    for name in settings:
        without = {other: value for other, value in settings.items() if other != name}
        done = subprocess.run([script], env=path | without, capture_output=True, text=True, check=False)
        assert done.returncode != 0, name
        assert name in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_a_script_and_is_told_what_the_script_asks_for(unit):
    text = (DEPLOY / "systemd" / f"{unit}.service").read_text()
    part = UNITS[unit]
    assert f"ExecStart=/opt/niss/run/{part}\n" in text
    folder = re.search(r"NISS_FOLDER=(\S+)", text)
    state = re.search(r"^StateDirectory=(\S+)$", text, re.MULTILINE)
    assert folder is not None
    assert state is not None
    assert folder[1] == f"/var/lib/{state[1]}", "the only folder that the unit may write"
    about = text.partition("[Unit]")[0]
    asked = needed(part) - {"NISS_FOLDER"}
    assert asked <= set(re.findall(r"NISS_[A-Z]+", about)), (
        "the top of the unit says what its .env is to hold"
    )


def test_the_units_are_valid_and_closed(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    # Installed somewhere else than in /opt/niss, so that the commands are found.
    shutil.copytree(DEPLOY / "systemd", tmp_path / "systemd")
    shutil.copytree(DEPLOY / "run", tmp_path / "opt" / "run")
    for unit in UNITS:
        path = tmp_path / "systemd" / f"{unit}.service"
        path.write_text(path.read_text().replace("/opt/niss", str(tmp_path / "opt")))
        verify = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert unit not in done.stderr, done.stderr
        rate = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(path)]
        done = subprocess.run(rate, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"its exposure is above 2.0\n{done.stdout[-300:]}"


def test_the_check_of_units_sees_a_mistake(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    path = tmp_path / "niss-odd.service"
    path.write_text("[Service]\nExecStart=/no/such/program\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "niss-odd" in done.stderr
    rate = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(path)]
    assert subprocess.run(rate, capture_output=True, check=False).returncode != 0
