"""`teacher-logits doctor`: what stands in the way of sharing memory, and how to mend it."""

import ctypes
import errno
import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from tests.client.publishing.a_publisher import a_teacher
from tests.held import left_behind, open_descriptors

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError
from teacher_logits_client import cli, testing
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.config import find_connection, parse_address
from teacher_logits_client.doctor import Finding, Report, Verdict, gpus, kernel, place, software
from teacher_logits_client.doctor.config import Surroundings, read_surroundings
from teacher_logits_client.doctor.connection import Visit, visit_server
from teacher_logits_client.doctor.memory import memory_findings
from teacher_logits_client.doctor.proxies import proxy_finding
from teacher_logits_client.line import file_watch

GIB = 1 << 30
linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="tries Linux itself")


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Findings by their names, of which none may come twice."""
    listed = list(findings)
    assert len({each.name for each in listed}) == len(listed)
    return {each.name: each for each in listed}


class TestTheReport:
    def test_is_as_bad_as_its_worst_finding(self) -> None:
        good, bad, worse = (
            Finding(name=verdict.value, verdict=verdict, message="so") for verdict in Verdict
        )

        assert Report(findings=(good,)).verdict is Verdict.OK
        assert Report(findings=(bad, good)).verdict is Verdict.WARN
        assert Report(findings=(good, worse, bad)).verdict is Verdict.FAIL

    def test_gives_the_cure_below_what_it_cures(self) -> None:
        finding = Finding(
            name="memory", verdict=Verdict.WARN, message="there is little", cure="buy more"
        )

        lines = Report(findings=(finding,)).to_text().splitlines()

        assert lines[0].split() == ["warn", "memory", "there", "is", "little"]
        assert lines[1].strip() == "cure: buy more"
        assert lines[-1] == "warn: 0 ok, 1 warn, 0 fail"

    def test_keeps_long_lines_within_a_terminal(self) -> None:
        finding = Finding(name="a", verdict=Verdict.OK, message="word " * 60, cure="cure " * 60)

        assert max(map(len, Report(findings=(finding,)).to_text().splitlines())) <= 100

    def test_has_numbers_in_its_json(self) -> None:
        finding = Finding(name="a", verdict=Verdict.OK, message="m", facts={"size_bytes": 3})

        document = json.loads(Report(findings=(finding,)).to_json())

        assert document == {
            "verdict": "ok",
            "findings": [
                {
                    "name": "a",
                    "verdict": "ok",
                    "message": "m",
                    "cure": "",
                    "facts": {"size_bytes": 3},
                }
            ],
        }


@linux_only
class TestTheKernel:
    def test_every_trial_that_server_and_client_rely_on_is_made(self) -> None:
        assert set(by_name(kernel.kernel_findings())) == {
            "kernel",
            "sealed_slab",
            "slab_passing",
            "peer_pidfd",
            "pidfd_open",
            "file_watch",
            "populate_read",
            "page_map",
        }

    def test_no_trial_leaves_a_descriptor_behind(self) -> None:
        kernel.kernel_findings()
        before = open_descriptors()
        kernel.kernel_findings()

        assert not left_behind(before, open_descriptors)

    def test_without_memfd_slabs_are_warned_about_and_the_rest_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = by_name(kernel.kernel_findings())

        def refuse(*_: object) -> int:
            raise PermissionError(1, "not here")

        monkeypatch.setattr(os, "memfd_create", refuse)
        found = by_name(kernel.kernel_findings())

        changed = {name for name in found if found[name] != before[name]}
        assert changed == {"sealed_slab", "slab_passing", "file_watch"}
        assert found["sealed_slab"].verdict is Verdict.WARN
        assert "not here" in found["sealed_slab"].message
        assert "streamed" in found["sealed_slab"].cure

    def test_a_user_without_a_watch_left_is_told_which_limit_to_raise(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none_left(flags: int) -> int:
            ctypes.set_errno(errno.EMFILE)
            return -1

        monkeypatch.setattr(file_watch, "_libc", SimpleNamespace(inotify_init1=none_left))
        found = by_name(kernel.kernel_findings())["file_watch"]

        assert found.verdict is Verdict.WARN
        assert "Too many open files" in found.message
        assert "fs.inotify.max_user_instances" in found.cure

    def test_an_old_kernel_is_told_which_one_proves_peers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel, "_SO_PEERPIDFD", 9999)

        found = by_name(kernel.kernel_findings())["peer_pidfd"]

        assert found.verdict is Verdict.WARN
        assert "6.5" in found.cure

    def test_another_system_is_told_that_payloads_are_streamed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(platform, "system", lambda: "Darwin")

        (finding,) = kernel.kernel_findings()

        assert finding.verdict is Verdict.WARN
        assert "streamed" in finding.message


class Machine:
    """A machine's files about memory, as a test wants them."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.shm = folder / "no-such-mount"
        self.write(self.proc / "meminfo", "MemTotal: 99 kB\nMemAvailable:   8388608 kB")
        self.write(self.proc / "self" / "cgroup", "0::/box/inner")

    @staticmethod
    def write(path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def limit(self, group: str, *, limit: int | str, usage: int, cache: int = 0) -> None:
        """Set a version 2 group's numbers."""
        self.write(self.cgroups / group / "memory.max", limit)
        self.write(self.cgroups / group / "memory.current", usage)
        self.write(self.cgroups / group / "memory.stat", f"anon 5\ninactive_file {cache}")

    def findings(self, pool_size_bytes: int = GIB) -> dict[str, Finding]:
        return by_name(
            memory_findings(
                pool_size_bytes, proc=self.proc, cgroups=self.cgroups, shared_mount=self.shm
            )
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class TestMemory:
    def test_that_suffices_is_ok(self, machine: Machine) -> None:
        found = machine.findings()

        assert {each.verdict for each in found.values()} == {Verdict.OK}
        assert found["memory_available"].facts["free_bytes"] == 8 * GIB

    def test_that_is_short_is_a_warning_with_the_flag_to_lower(self, machine: Machine) -> None:
        found = machine.findings(9 * GIB)["memory_available"]

        assert found.verdict is Verdict.WARN
        assert "8 GiB" in found.message
        assert "--pool-size" in found.cure

    def test_a_cgroup_counts_less_what_it_uses(self, machine: Machine) -> None:
        machine.limit("box/inner", limit=2 * GIB, usage=3 * GIB // 2)

        found = machine.findings()["memory_cgroup"]

        assert found.verdict is Verdict.WARN
        assert found.facts["free_bytes"] == GIB // 2
        assert "/box/inner" in found.message

    def test_page_cache_that_can_be_dropped_counts_as_free(self, machine: Machine) -> None:
        machine.limit("box/inner", limit=2 * GIB, usage=3 * GIB // 2, cache=GIB)

        assert machine.findings()["memory_cgroup"].verdict is Verdict.OK

    def test_the_limit_of_a_parent_binds(self, machine: Machine) -> None:
        machine.limit("box/inner", limit="max", usage=5)
        machine.limit("box", limit=GIB, usage=GIB)

        found = machine.findings()["memory_cgroup"]

        assert found.verdict is Verdict.WARN
        assert found.facts["free_bytes"] == 0

    def test_version_1_is_understood_and_its_huge_number_is_no_limit(
        self, machine: Machine
    ) -> None:
        machine.write(machine.proc / "self" / "cgroup", "4:memory:/old")
        folder = machine.cgroups / "memory" / "old"
        machine.write(folder / "memory.usage_in_bytes", GIB)
        machine.write(folder / "memory.stat", "total_inactive_file 0")
        machine.write(folder / "memory.limit_in_bytes", 9223372036854771712)
        assert "no cgroup limit" in machine.findings()["memory_cgroup"].message

        machine.write(folder / "memory.limit_in_bytes", GIB + 7)

        assert machine.findings()["memory_cgroup"].facts["free_bytes"] == 7

    def test_that_cannot_be_read_limits_nothing(self, tmp_path: Path) -> None:
        found = memory_findings(GIB, proc=tmp_path, cgroups=tmp_path, shared_mount=tmp_path)

        assert {each.verdict for each in found} == {Verdict.OK}

    def test_the_shared_mount_is_for_information_only(self, machine: Machine) -> None:
        machine.shm = machine.proc

        found = machine.findings()["dev_shm"]

        assert found.verdict is Verdict.OK
        assert "memfd" in found.message


class TestThePlace:
    def test_a_socket_path_over_the_limit_fails_with_both_numbers(self) -> None:
        found = place.socket_finding(f"/{'x' * 107}")

        assert found.verdict is Verdict.FAIL
        assert "108 bytes" in found.message
        assert "107" in found.message
        assert "--listen" in found.cure

    def test_a_socket_path_at_the_limit_is_fine(self) -> None:
        assert place.socket_finding(f"/{'x' * 106}").verdict is Verdict.OK

    def test_a_socket_says_whether_anybody_listens(self, tmp_path: Path) -> None:
        path = str(tmp_path / "s")
        assert "no server" in place.socket_finding(path).message

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            assert "a server listens" in place.socket_finding(path).message

        assert "left behind" in place.socket_finding(path).message

    def test_the_default_socket_is_in_the_users_runtime_folder(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

        surroundings = read_surroundings()

        assert surroundings.socket_path == str(tmp_path / "teacher-logits" / "teacher.sock")
        assert str(tmp_path) in place.runtime_folder_finding(surroundings).message

    def test_a_runtime_folder_that_is_not_there_is_as_good_as_none(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))

        assert read_surroundings().runtime_folder == ""

    def test_proxies_are_named_without_their_passwords_and_said_to_be_ignored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")

        found = proxy_finding(read_surroundings().proxies)

        assert found.facts["names"].split(",")[0] == "https_proxy"  # type: ignore[union-attr]
        assert "ignored" in found.message
        assert "secret" not in repr(found)

    def test_few_open_files_are_a_warning(self) -> None:
        assert place.open_files_finding(256).verdict is Verdict.WARN
        assert place.open_files_finding(1024).verdict is Verdict.OK

    def test_unlimited_open_files_are_not_minus_one(self) -> None:
        found = place.open_files_finding(-1)

        assert found.verdict is Verdict.OK
        assert "unlimited" in found.message

    def test_everything_has_a_finding(self) -> None:
        surroundings = Surroundings(runtime_folder="", socket_path="/t/s", proxies=("http_proxy",))

        assert set(by_name(place.place_findings(surroundings))) == {
            "identity",
            "container",
            "open_files",
            "default_socket",
            "runtime_folder",
        }


class TestTheSoftware:
    def test_a_python_that_is_too_old_fails(self) -> None:
        found = software.python_finding((3, 9, 18))

        assert found.verdict is Verdict.FAIL
        assert "3.10" in found.cure

    def test_this_python_is_new_enough(self) -> None:
        assert software.python_finding((3, 10, 0)).verdict is Verdict.OK

    def test_versions_are_facts(self) -> None:
        packages = by_name(software.version_findings())["packages"]

        assert packages.facts["teacher-logits"] == tl.__version__
        assert {"torch", "grpcio", "protobuf"} <= set(packages.facts)

    def test_a_missing_engine_only_warns_and_a_missing_requirement_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = metadata.version

        def look_up(name: str) -> str:
            if name in ("gguf", "crc32c"):
                raise metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(metadata, "version", look_up)
        found = by_name(software.version_findings())

        assert found["packages"].verdict is Verdict.FAIL
        assert "crc32c" in found["packages"].message
        assert found["engine_packages"].verdict is Verdict.WARN
        assert "teacher-logits[transformers]" in found["engine_packages"].cure

    @pytest.mark.parametrize(
        ("library", "models", "said"),
        [
            (True, ("NVIDIA H200",), ["sees NVIDIA H200", "libcuda.so.1", "cuda_ipc"]),
            (False, ("NVIDIA H200",), ["sees NVIDIA H200", "libcuda.so.1 is not here"]),
            (True, (), ["no GPU", "libcuda.so.1"]),
            (False, (), ["no GPU", "no libcuda.so.1", "host memory"]),
        ],
    )
    def test_what_is_seen_of_cuda_is_said(
        self, library: bool, models: tuple[str, ...], said: list[str]
    ) -> None:
        nodes = tuple(f"nvidia{index}" for index in range(len(models)))
        found = gpus.cuda_finding(gpus.Gpus(models=models, nodes=nodes, has_library=library))
        assert found.verdict is (Verdict.WARN if models and not library else Verdict.OK)
        assert (found.facts["device_count"], found.facts["driver_library"]) == (
            len(models),
            library,
        )
        assert "later release" not in found.message
        for words in said:
            assert words in found.message

    def test_gpus_are_read_where_the_kernel_driver_lists_them(self, tmp_path: Path) -> None:
        for bus in ("0000:01:00.0", "0000:02:00.0"):
            (tmp_path / "gpus" / bus).mkdir(parents=True)
            information = tmp_path / "gpus" / bus / "information"
            information.write_text("Model: \t NVIDIA H200\nIRQ: 9\n")
        found = gpus.look_at_gpus(tmp_path, tmp_path / "dev")
        assert found.models == ("NVIDIA H200", "NVIDIA H200")
        assert gpus.look_at_gpus(tmp_path / "nowhere", tmp_path).models == ()

    def test_no_driver_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(*_: object) -> int:
            raise AssertionError("torch was asked, which starts the driver")

        monkeypatch.setattr("torch.cuda.device_count", start)
        monkeypatch.setattr("torch.cuda.get_device_name", start)
        assert "cuda" in by_name([gpus.cuda_finding(gpus.look_at_gpus())])


@pytest.fixture(scope="module")
def server() -> Iterator[testing.ServerProcess]:
    """A server in a process of its own."""
    with testing.serve() as process:
        yield process


@pytest.fixture(scope="module")
def streaming_server() -> Iterator[testing.ServerProcess]:
    """A server that offers no shared memory."""
    with testing.serve(transports="stream") as process:
        yield process


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who signs certificates here."""
    return trustme.CA()


@pytest.fixture(scope="module")
def server_by_tls(
    authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[testing.ServerProcess]:
    """A server that listens at a port, over TLS."""
    folder = tmp_path_factory.mktemp("tls")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1", "teacher.example")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    os.chmod(folder / "key.pem", 0o600)
    with testing.serve(
        listen=["127.0.0.1:0"], tls_cert=folder / "cert.pem", tls_key=folder / "key.pem"
    ) as process:
        yield process


def visited(
    address: str,
    *,
    tls: tl.Tls | None = None,
    token: str | None = None,
    locality: tl.Locality = tl.Locality.PREFER,
    teacher_id: str = "",
    timeout: float = 20,
) -> dict[str, Finding]:
    """What the doctor finds at an address."""
    return by_name(
        visit_server(
            Visit(
                connection=find_connection(address, tls=tls, token=token),
                timeout=timeout,
                locality=locality,
                teacher_id=teacher_id,
            ),
            knows_peers=True,
            has_gpu=False,
        ).findings
    )


@linux_only
class TestAVisit:
    def test_finds_shared_memory_where_it_can_be_proven(
        self, server: testing.ServerProcess
    ) -> None:
        found = visited(server.address)

        assert {each.verdict for each in found.values()} == {Verdict.OK}
        assert found["transport"].facts["transport"] == "shared_memory"
        assert found["handshake"].facts["vocabulary_size"] == 256

    def test_names_the_checks_that_a_doctor_cannot_make(
        self, server: testing.ServerProcess
    ) -> None:
        message = visited(server.address)["handshake"].message

        passed, unchecked = message.split("unchecked, since")
        assert "causality" in passed
        assert "tokenizer" in unchecked

    def test_leaves_no_session_behind(self, server: testing.ServerProcess) -> None:
        visited(server.address)

        until = time.monotonic() + 30  # a session ends a moment after its close
        while inspect_server(parse_address(server.address), timeout=20).sessions:
            assert time.monotonic() < until

    def test_of_a_streaming_server_says_what_refused_shared_memory_and_the_cure(
        self, streaming_server: testing.ServerProcess
    ) -> None:
        found = visited(streaming_server.address)

        assert found["transport"].verdict is Verdict.WARN
        assert found["transport"].facts["transport"] == "stream"
        assert found["refused_shared_memory"].facts["reason"] == "NOT_OFFERED"
        assert "--transports" in found["refused_shared_memory"].cure

    def test_that_insists_on_shared_memory_fails_where_there_is_none(
        self, streaming_server: testing.ServerProcess
    ) -> None:
        found = visited(streaming_server.address, locality=tl.Locality.REQUIRE)

        assert found["handshake"].verdict is Verdict.FAIL
        assert "NOT_OFFERED" in found["handshake"].message
        assert "--transports" in found["handshake"].cure

    def test_for_a_teacher_that_is_not_there_names_the_flag(
        self, server: testing.ServerProcess
    ) -> None:
        found = visited(server.address, teacher_id="somebody-else", timeout=600)

        assert found["handshake"].verdict is Verdict.FAIL
        assert "not waited for" in found["handshake"].message
        assert "--teacher-id" in found["handshake"].cure

    def test_is_admitted_by_a_published_teacher_of_any_batch_size(
        self, server: testing.ServerProcess
    ) -> None:
        profile = a_teacher("published")
        with tl.connect(server.address) as client, client.open_publisher(profile):
            found = visited(server.address, teacher_id="published", timeout=20)

        assert found["handshake"].verdict is Verdict.OK

    def test_of_several_teachers_lists_them_and_visits_the_first(
        self, server: testing.ServerProcess
    ) -> None:
        profile = a_teacher("another")
        with tl.connect(server.address) as client, client.open_publisher(profile):
            found = visited(server.address)

        assert found["teachers"].facts["teachers"] == "teacher, another"
        assert found["handshake"].facts["teacher_id"] == "teacher"

    def test_where_nobody_is_fails_and_goes_no_further(self, tmp_path: Path) -> None:
        found = visited(f"unix:{tmp_path / 'nobody'}", timeout=0.2)

        assert list(found) == ["socket_folder", "server"]
        assert found["socket_folder"].facts["missing"] == str(tmp_path / "nobody")
        assert found["server"].verdict is Verdict.FAIL
        assert found["server"].facts["reason"] == "SERVER_UNREACHABLE"
        assert found["server"].cure

    def test_holds_memory_against_the_pool_of_the_server(
        self, server: testing.ServerProcess, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.doctor([server.address, "--json"]) == 0

        found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
        view = inspect_server(parse_address(server.address), timeout=20)
        assert found["pool"]["facts"]["budget_bytes"] == view.pool.budget_bytes
        if "free_bytes" in (facts := found["memory_available"]["facts"]):
            assert facts["pool_size_bytes"] == view.pool.budget_bytes
        assert found["server_namespaces"]["facts"]["server_pid"] == server.pid

    def test_over_tcp_goes_stage_by_stage(
        self, server_by_tls: testing.ServerProcess, authority: trustme.CA, tmp_path: Path
    ) -> None:
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")

        found = visited(server_by_tls.address, tls=tl.Tls(ca=tmp_path / "ca.pem"))

        stages = ["dns", "tcp", "tls", "certificate_name", "certificate_time", "server"]
        assert list(found)[:6] == stages
        assert {found[each].verdict for each in stages} == {Verdict.OK}
        assert found["certificate_name"].facts["names"] == "127.0.0.1,teacher.example"
        assert found["handshake"].verdict is Verdict.OK

    def test_over_tcp_tells_a_wrong_name_from_a_wrong_signature(
        self, server_by_tls: testing.ServerProcess, authority: trustme.CA, tmp_path: Path
    ) -> None:
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        misnamed = tl.Tls(ca=tmp_path / "ca.pem", server_name="student.example")

        found = visited(server_by_tls.address, tls=misnamed)
        assert [each.verdict.value for each in found.values()] == ["ok", "ok", "ok", "fail", "ok"]
        assert "--tls-server-name" in found["certificate_name"].cure

        found = visited(server_by_tls.address, tls=tl.Tls(ca=tmp_path / "other.pem"))
        assert list(found) == ["dns", "tcp", "tls"]
        assert found["tls"].facts["reason"] == "CERTIFICATE_UNTRUSTED"
        assert "--tls-ca" in found["tls"].cure

    def test_without_tls_to_a_server_that_speaks_it_says_which_flags(
        self, server_by_tls: testing.ServerProcess
    ) -> None:
        found = visited(server_by_tls.address)

        assert list(found) == ["dns", "tcp", "tls"]
        assert found["tls"].facts["reason"] == "TLS_EXPECTED"
        assert "tls://" in found["tls"].cure

    @pytest.mark.slow
    def test_with_a_students_token_names_no_teachers_and_shakes_hands_all_the_same(
        self, tmp_path: Path
    ) -> None:
        student, operator, nobody = "student" * 3, "operator" * 3, "nobody" * 3
        (tmp_path / "tokens").write_text(f"student {student}\noperator {operator}\n")
        (tmp_path / "tokens").chmod(0o600)
        with testing.serve(token_file=tmp_path / "tokens") as server:
            found = visited(server.address, token=student)
            seen_by_operator = visited(server.address, token=operator)
            unknown = visited(server.address, token=nobody)

        assert found["pool"].facts == {"reason": "NOT_ALLOWED", "finer_reason": "ROLE_LACKING"}
        assert found["handshake"].verdict is Verdict.OK
        assert found["transport"].facts["transport"] == "shared_memory"
        assert seen_by_operator["pool"].facts["budget_bytes"]
        assert seen_by_operator["handshake"].verdict is Verdict.FAIL
        assert "--token-file" in seen_by_operator["handshake"].cure
        last = list(unknown.values())[-1]
        assert (last.verdict, last.facts["reason"]) == (Verdict.FAIL, "UNKNOWN_CALLER")
        assert last.facts["finer_reason"] == "TOKEN_UNKNOWN"
        assert seen_by_operator["handshake"].facts["finer_reason"] == "ROLE_LACKING"
        assert "--allow-uid" not in seen_by_operator["handshake"].cure
        assert "--token-file" in last.cure

    def test_of_a_port_where_nobody_listens_fails_before_any_server(self) -> None:
        with socket.socket() as free:  # bound, and not listening: nobody else gets it
            free.bind(("127.0.0.1", 0))
            found = visited(f"127.0.0.1:{free.getsockname()[1]}")

        assert list(found) == ["dns", "tcp"]
        assert found["tcp"].verdict is Verdict.FAIL
        assert "--listen" in found["tcp"].cure


class TestTheCommand:
    def test_looks_at_this_machine_and_exits_with_0(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.doctor([]) == 0

        assert capsys.readouterr().out.splitlines()[-1].split(":")[0] in {"ok", "warn"}

    def test_speaks_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.doctor(["--json"]) == 0

        document = json.loads(capsys.readouterr().out)
        names = [finding["name"] for finding in document["findings"]]
        assert {"python", "packages", "memory_available", "identity"} <= set(names)
        assert "server" not in names

    def test_exits_with_1_where_something_fails(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code = cli.doctor([f"unix:{tmp_path / 'nobody'}", "--timeout", "0.2", "--json"])

        document = json.loads(capsys.readouterr().out)
        assert code == 1
        assert document["verdict"] == "fail"
        assert document["findings"][-1]["name"] == "server"

    def test_holds_memory_against_the_pool_that_it_is_told_of(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.doctor(["--pool-size", "900TiB", "--json"]) == 0

        found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
        if "free_bytes" in found["memory_available"]["facts"]:
            assert found["memory_available"]["verdict"] == "warn"

    @pytest.mark.parametrize(
        ("argv", "named"),
        [
            (["--pool-size", "much"], "--pool-size"),
            (["--pool-size", "9" * 400], "--pool-size"),
            (["--pool-size", "9" * 5000], "--pool-size"),
            (["--timeout", "0"], "--timeout"),
            (["nonsense"], "nonsense"),
            (["unix:relative"], "absolute"),
            (["192.0.2.1:5555"], "insecure"),
        ],
    )
    def test_refuses_what_makes_no_sense_by_name(self, argv: list[str], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            cli.doctor(argv)
