"""What the doctor makes of machines and containers that are not here, each by its facts."""

import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.addresses import read_address
from teacher_logits.errors import (
    NoCommonTransportError,
    NotAllowedError,
    SessionRefusedError,
    TeacherLogitsError,
    Violation,
)
from teacher_logits.transport import RefusalReason
from teacher_logits_client.calls import tls_findings
from teacher_logits_client.doctor import (
    Finding,
    Verdict,
    certificates,
    cures,
    gpus,
    host,
    ray_cluster,
)
from teacher_logits_client.doctor.certificates import Certificate, Handshake
from teacher_logits_client.doctor.config import Surroundings, read_surroundings
from teacher_logits_client.doctor.gpus import Gpus
from teacher_logits_client.doctor.host import KernelSettings
from teacher_logits_client.doctor.namespaces import (
    MACHINES_OWN,
    NAMES,
    Server,
    container_finding,
    look_at_server,
    namespaces_of,
    server_namespaces_finding,
)
from teacher_logits_client.doctor.proxies import is_caught, proxy_finding
from teacher_logits_client.doctor.ray_cluster import Ray, ray_findings
from teacher_logits_client.doctor.reach import Reached, reach_findings
from teacher_logits_client.doctor.sockets import Entry, Way, look_at_way, may, way_finding

HERE = dict.fromkeys(NAMES, 7)


def with_server(
    namespaces: Mapping[str, int], *, pid: int = 5, knows_peers: bool = True, has_gpu: bool = False
) -> Finding:
    return server_namespaces_finding(
        HERE,
        Server(pid=pid, uid=0, namespaces=namespaces),
        knows_peers=knows_peers,
        has_gpu=has_gpu,
    )


class TestNamespaces:
    def test_the_machines_own_are_known_by_their_numbers(self) -> None:
        found = container_finding({**MACHINES_OWN, "net": 9, "mnt": 9})

        assert "on the machine itself" in found.message
        assert found.facts == dict.fromkeys(MACHINES_OWN, True)

    @pytest.mark.parametrize("name", MACHINES_OWN)
    def test_one_that_is_not_the_machines_shows_a_container(self, name: str) -> None:
        found = container_finding({**MACHINES_OWN, name: 4026532000})

        assert "in a container" in found.message
        assert [each for each, own in found.facts.items() if not own] == [name]

    def test_those_that_cannot_be_seen_are_not_guessed(self) -> None:
        assert "cannot be seen" in container_finding({}).message

    def test_a_server_in_all_of_ours_is_fine(self) -> None:
        found = with_server(HERE)

        assert found.verdict is Verdict.OK
        assert "shares pid, ipc, net, mnt, user, uts, cgroup" in found.message

    @pytest.mark.parametrize("name", [each for each in NAMES if each != "pid"])
    def test_another_one_than_pid_is_told_with_what_it_means_and_costs_nothing(
        self, name: str
    ) -> None:
        found = with_server({**HERE, name: 8}, has_gpu=True, knows_peers=False)

        assert found.verdict is Verdict.OK
        assert f"{name}: " in found.message
        assert found.facts[name] is False

    @pytest.mark.parametrize(
        ("knows_peers", "has_gpu", "verdict"),
        [
            (True, False, Verdict.OK),
            (False, False, Verdict.WARN),
            (True, True, Verdict.WARN),
        ],
    )
    def test_another_pid_namespace_costs_where_peers_are_not_known_or_there_is_a_gpu(
        self, knows_peers: bool, has_gpu: bool, verdict: Verdict
    ) -> None:
        found = with_server({**HERE, "pid": 8}, knows_peers=knows_peers, has_gpu=has_gpu)

        assert found.verdict is verdict
        assert ("shareProcessNamespace" in found.cure) == (verdict is Verdict.WARN)

    def test_a_server_whose_pid_is_not_seen_is_in_another_pid_namespace(self) -> None:
        found = with_server({}, pid=0)

        assert found.facts["pid"] is False
        assert "not to be seen from here: ipc, net" in found.message

    def test_of_a_process_that_is_not_there_nothing_is_said(self, tmp_path: Path) -> None:
        assert namespaces_of(2**22 + 1) == {}
        assert look_at_server(str(tmp_path / "nobody")) is None

    def test_who_listens_is_the_kernels_word(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            found = look_at_server(str(tmp_path / "s"))

        assert found is not None
        assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
        assert found.namespaces == namespaces_of("self")


def a_way(*entries: Entry, uid: int = 1000, gids: tuple[int, ...] = (1000,)) -> Way:
    return Way(path="/run/t/s", entries=entries, missing="", uid=uid, gids=frozenset(gids))


ROOT_FOLDER = Entry(path="/", mode=0o755, uid=0, gid=0)
SOCKET = Entry(path="/run/t/s", mode=0o777, uid=7, gid=70, is_socket=True)


class TestTheWayToASocket:
    @pytest.mark.parametrize(
        ("mode", "uid", "gids", "comes"),
        [
            (0o700, 7, (1,), True),
            (0o700, 8, (70,), False),
            (0o710, 8, (70,), True),
            (0o711, 8, (1,), True),
            (0o077, 7, (70,), False),  # the owner's bits alone count for the owner
            (0o000, 0, (0,), True),
        ],
    )
    def test_goes_through_a_folder_as_its_mode_says(
        self, mode: int, uid: int, gids: tuple[int, ...], comes: bool
    ) -> None:
        folder = Entry(path="/run/t", mode=mode, uid=7, gid=70)

        found = way_finding(a_way(ROOT_FOLDER, folder, SOCKET, uid=uid, gids=gids))

        assert found.verdict is (Verdict.OK if comes else Verdict.FAIL)
        if not comes:
            assert found.facts["denied_at"] == "/run/t"
            assert "uid 7" in found.cure
            assert "group 70" in found.cure

    def test_ends_at_a_socket_that_may_not_be_written_to(self) -> None:
        shut = replace(SOCKET, mode=0o755)

        found = way_finding(a_way(ROOT_FOLDER, shut, uid=8))

        assert found.verdict is Verdict.FAIL
        assert "connect to it" in found.message
        assert "g+w" in found.cure

    def test_that_ends_early_says_what_is_missing(self) -> None:
        found = way_finding(replace(a_way(ROOT_FOLDER), missing="/run/t"))

        assert found.verdict is Verdict.WARN
        assert "/run/t is not there" in found.message
        assert "mount the socket's folder" in found.cure

    def test_is_looked_at_from_the_root_on(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        assert look_at_way(str(path)).missing == str(path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            way = look_at_way(str(path))

        assert way.missing == ""
        assert [each.path for each in way.entries][:1] == ["/"]
        assert (way.entries[-1].path, way.entries[-1].is_socket) == (str(path), True)
        assert way_finding(way).verdict is Verdict.OK
        assert {each.allowed for each in way.entries} == {True}

    @given(
        entry=st.builds(
            Entry,
            path=st.just("/x"),
            mode=st.integers(0, 0o777),
            uid=st.integers(0, 3),
            gid=st.integers(0, 3),
            is_socket=st.booleans(),
        ),
        uid=st.integers(1, 3),
        gids=st.frozensets(st.integers(0, 3)),
    )
    def test_the_bits_of_the_class_that_one_is_in_are_the_only_ones(
        self, entry: Entry, uid: int, gids: frozenset[int]
    ) -> None:
        who = "USR" if uid == entry.uid else "GRP" if entry.gid in gids else "OTH"
        right: int = getattr(stat, f"S_I{'W' if entry.is_socket else 'X'}{who}")

        assert may(entry, uid=uid, gids=gids) == bool(entry.mode & right)

    @pytest.mark.parametrize("allowed", [True, False])
    def test_the_kernels_word_goes_before_the_mode(self, allowed: bool) -> None:
        entry = replace(ROOT_FOLDER, mode=0o000 if allowed else 0o777, allowed=allowed)

        assert may(entry, uid=1000, gids=frozenset()) is allowed


class TestProxies:
    @pytest.mark.parametrize(
        ("address", "exempt", "caught"),
        [
            ("unix:/run/s", (), False),
            ("teacher:5555", (), True),
            ("teacher:5555", ("*",), False),
            ("a.example.com:5555", ("example.com",), False),
            ("a.example.com:5555", (".example.com",), False),
            ("a.example.com:5555", ("*.example.com",), False),
            ("a.example.org:5555", ("example.com",), True),
            ("A.Example.com:5555", ("example.COM",), False),
            ("10.1.2.3:5555", ("10.0.0.0/8",), False),
            ("11.1.2.3:5555", ("10.0.0.0/8",), True),
            ("[fd00::1]:5555", ("fd00::/8",), False),
        ],
    )
    def test_catch_what_no_exemption_names(
        self, address: str, exempt: tuple[str, ...], caught: bool
    ) -> None:
        where = read_address(address, what="address")

        assert is_caught(where, exempt) is caught
        found = proxy_finding(("http_proxy",), exempt, address=where)
        assert found.facts["would_catch"] is caught
        assert ("add" in found.message and "no_proxy" in found.message) is caught

    def test_that_are_not_there_catch_nobody(self) -> None:
        where = read_address("teacher:5555", what="address")

        assert proxy_finding((), address=where).facts["would_catch"] is False

    def test_exempt_hosts_are_read_from_the_first_variable_that_has_some(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("no_grpc_proxy", "NO_GRPC_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("no_proxy", " a.b , ,10.0.0.0/8")
        assert read_surroundings().exempt == ("a.b", "10.0.0.0/8")

        monkeypatch.setenv("no_grpc_proxy", "only.this")
        assert read_surroundings().exempt == ("only.this",)


class TestTheKernelsSettings:
    def test_are_read_where_the_kernel_shows_them(self, tmp_path: Path) -> None:
        (tmp_path / "kernel/yama").mkdir(parents=True)
        (tmp_path / "kernel/yama/ptrace_scope").write_text("1\n")
        assert host.read_kernel_settings(tmp_path) == KernelSettings(
            ptrace_scope=1, inotify_instances=None, inotify_watches=None
        )

    @pytest.mark.parametrize("scope", [None, 0, 1, 2, 3])
    def test_no_ptrace_scope_stands_in_the_way(self, scope: int | None) -> None:
        found = host.ptrace_finding(scope)

        assert found.verdict is Verdict.OK
        assert ("no Yama" in found.message) == (scope is None)

    @pytest.mark.parametrize(
        ("instances", "watches", "verdict"),
        [(128, 8192, Verdict.OK), (127, 8192, Verdict.WARN), (8192, 10, Verdict.WARN)],
    )
    def test_few_watches_are_a_warning_with_both_settings(
        self, instances: int, watches: int, verdict: Verdict
    ) -> None:
        settings = KernelSettings(
            ptrace_scope=0, inotify_instances=instances, inotify_watches=watches
        )
        found = host.inotify_finding(settings)

        assert found.verdict is verdict
        assert ("max_user_instances" in found.cure) == (verdict is Verdict.WARN)

    def test_limits_that_are_not_shown_are_not_judged(self) -> None:
        settings = KernelSettings(ptrace_scope=0, inotify_instances=None, inotify_watches=1)

        assert host.inotify_finding(settings).verdict is Verdict.OK


H200 = Gpus(
    models=("NVIDIA H200",) * 2,
    driver_version="580.65",
    nodes=("nvidia0", "nvidia1"),
    has_library=True,
    has_tool=True,
)


class TestDevices:
    def test_whole_gpus_with_their_driver_are_fine(self) -> None:
        found = gpus.gpu_findings(H200, visible_devices="0,1", allocators=())

        assert {each.verdict for each in found} == {Verdict.OK}
        assert "580.65 sees NVIDIA H200, NVIDIA H200" in found[0].message

    @pytest.mark.parametrize(
        ("seen", "said"),
        [
            (replace(H200, has_library=False), "NVIDIA_DRIVER_CAPABILITIES"),
            (replace(H200, nodes=()), "--gpus all"),
        ],
    )
    def test_a_container_without_library_or_nodes_is_told_how_to_get_them(
        self, seen: Gpus, said: str
    ) -> None:
        found = gpus.cuda_finding(seen)

        assert found.verdict is Verdict.WARN
        assert said in found.cure

    def test_a_container_with_some_of_the_gpus_says_how_many(self) -> None:
        found = gpus.cuda_finding(replace(H200, nodes=("nvidia1",)))

        assert found.verdict is Verdict.OK
        assert "1 of them are given to this container" in found.message

    @pytest.mark.parametrize(
        ("instances", "visible", "verdict"),
        [
            ((), "", Verdict.OK),
            ((), "GPU-1,0", Verdict.OK),
            (("gpu0/gi3",), "", Verdict.WARN),
            ((), "MIG-3c1e", Verdict.WARN),
        ],
    )
    def test_a_gpu_that_is_cut_up_hands_nothing_over(
        self, instances: tuple[str, ...], visible: str, verdict: Verdict
    ) -> None:
        seen = replace(H200, mig_instances=instances)

        assert gpus.mig_finding(seen, visible_devices=visible).verdict is verdict

    def test_the_drivers_files_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "capabilities/gpu0/mig/gi3").mkdir(parents=True)
        (tmp_path / "version").write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        )
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia12"):
            (tmp_path / name).touch()

        found = gpus.look_at_gpus(tmp_path, tmp_path)

        assert found.mig_instances == ("gpu0/gi3",)
        assert found.driver_version == "580.65.06"
        assert found.nodes == ("nvidia0", "nvidia12")

    @pytest.mark.parametrize(
        ("value", "cure"),
        [
            ("expandable_segments:True", "expandable_segments:False"),
            ("max_split_size_mb:64, Expandable_Segments : TRUE", "expandable_segments:False"),
            ("backend:cudaMallocAsync", "leave backend:cudaMallocAsync out"),
            ("expandable_segments:False", ""),
            ("backend:native", ""),
        ],
    )
    def test_an_allocator_whose_memory_nobody_else_can_open_is_named(
        self, value: str, cure: str
    ) -> None:
        settings = [("PYTORCH_CUDA_ALLOC_CONF", value)]
        found = gpus.allocator_finding(settings, has_gpu=True)

        assert found.verdict is (Verdict.WARN if cure else Verdict.OK)
        assert cure in found.cure
        assert gpus.allocator_finding(settings, has_gpu=False).verdict is Verdict.OK

    def test_both_of_the_allocators_variables_are_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "a:1")
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "b:2")

        assert dict(read_surroundings().allocators) == {
            "PYTORCH_CUDA_ALLOC_CONF": "a:1",
            "PYTORCH_ALLOC_CONF": "b:2",
        }


class TestRay:
    def test_that_is_not_installed_is_no_warning(self) -> None:
        (found,) = ray_findings(Ray())

        assert found.verdict is Verdict.OK
        assert "teacher-logits[ray]" in found.message

    @pytest.mark.parametrize(
        ("version", "verdict"),
        [("2.39.0", Verdict.WARN), ("2.40.0", Verdict.OK), ("3.0.0rc1", Verdict.OK)],
    )
    def test_that_is_too_old_is_a_warning(self, version: str, verdict: Verdict) -> None:
        assert ray_cluster.version_finding(version).verdict is verdict

    def test_whose_last_cluster_here_is_gone_only_says_so(self, tmp_path: Path) -> None:
        with socket.socket() as free:  # bound, and not listening
            free.bind(("127.0.0.1", 0))
            current = tmp_path / "current"
            current.write_text(f"127.0.0.1:{free.getsockname()[1]}\n")
            seen = ray_cluster.look_at_ray(Surroundings(), current=current)

        found = ray_cluster.cluster_finding(seen)
        assert found.verdict is Verdict.OK
        assert str(current) in found.message
        assert "is gone" in found.message

    def test_whose_named_cluster_is_gone_is_a_warning(self) -> None:
        with socket.socket() as free:  # bound, and not listening
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
            found = ray_cluster.cluster_finding(
                ray_cluster.look_at_ray(Surroundings(ray_address=address))
            )

        assert found.verdict is Verdict.WARN
        assert "ray start" in found.cure

    def test_whose_cluster_answers_is_fine(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            seen = ray_cluster.look_at_ray(Surroundings(ray_address=address))

        assert ray_cluster.cluster_finding(seen).verdict is Verdict.OK
        assert seen.source == "RAY_ADDRESS"

    @pytest.mark.parametrize("address", ["ray://head:10001", "local", "head:port"])
    def test_an_address_that_is_no_clusters_is_a_warning(self, address: str) -> None:
        seen = ray_cluster.look_at_ray(Surroundings(ray_address=address))

        assert ray_cluster.cluster_finding(seen).verdict is Verdict.WARN

    @pytest.mark.parametrize(
        ("mode", "has_token", "verdict", "said"),
        [
            ("", False, Verdict.OK, "no token"),
            ("", True, Verdict.OK, "only with RAY_AUTH_MODE=token"),
            ("token", True, Verdict.OK, "RAY_AUTH_MODE is token"),
            ("token", False, Verdict.WARN, "no cluster can be joined"),
            ("disabled", True, Verdict.OK, "disabled"),
        ],
    )
    def test_mode_and_token_are_held_together(
        self, mode: str, has_token: bool, verdict: Verdict, said: str
    ) -> None:
        found = ray_cluster.auth_finding(Ray(auth_mode=mode, has_token=has_token))

        assert found.verdict is verdict
        assert said in found.message

    def test_a_token_is_looked_for_where_ray_does_and_never_shown(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        assert not read_surroundings().has_ray_token
        (tmp_path / "token").write_text("secret")
        assert read_surroundings().has_ray_token
        assert "secret" not in repr(read_surroundings())


class TestTheWayOverTcp:
    def test_a_name_that_is_not_known_ends_it(self) -> None:
        reached = Reached(host="teacher", port=5555, lookup_error="Name or service not known")

        (found,) = reach_findings(reached)

        assert (found.name, found.verdict) == ("dns", Verdict.FAIL)
        assert "svc" in found.cure

    def test_a_port_that_takes_nothing_is_told_apart(self) -> None:
        reached = Reached(
            host="teacher",
            port=5555,
            addresses=("10.0.0.7",),
            connect_error="10.0.0.7: timed out",
        )

        named, port = reach_findings(reached)

        assert named.verdict is Verdict.OK
        assert (port.name, port.verdict) == ("tcp", Verdict.FAIL)
        assert "10.0.0.7: timed out" in port.message
        assert "NetworkPolicy" in port.cure


DAY = 86400.0
GOOD = Certificate(
    names=("*.example.com", "10.0.0.7"),
    wanted="teacher.example.com",
    not_before=0.0,
    not_after=365 * DAY,
    now=100 * DAY,
)


class TestCertificates:
    @pytest.mark.parametrize(
        ("name", "wanted", "fits"),
        [
            ("teacher.example.com", "Teacher.Example.COM", True),
            ("*.example.com", "teacher.example.com", True),
            ("*.example.com", "example.com", False),
            ("*.example.com", "a.b.example.com", False),
            ("*.com", "example.com", False),
            ("tea*.example.com", "teacher.example.com", False),
            ("10.0.0.7", "10.0.0.7", True),
            ("10.0.0.7", "10.0.0.8", False),
            ("*", "10.0.0.7", False),
            ("0:0::1", "::1", True),
        ],
    )
    def test_a_name_fits_whole_or_by_its_first_label(
        self, name: str, wanted: str, fits: bool
    ) -> None:
        assert certificates.matches(name, wanted) is fits

    @pytest.mark.parametrize(
        ("not_before", "not_after", "verdict"),
        [
            (0, 365, Verdict.OK),
            (0, 114, Verdict.OK),
            (0, 113, Verdict.WARN),
            (0, 99, Verdict.FAIL),
            (101, 365, Verdict.FAIL),
            (99.5, 100.5, Verdict.OK),  # a day's: the last fifth alone is soon
            (99.1, 100.1, Verdict.WARN),
        ],
    )
    def test_time_is_judged_by_what_is_left_of_it(
        self, not_before: float, not_after: float, verdict: Verdict
    ) -> None:
        seen = replace(GOOD, not_before=not_before * DAY, not_after=not_after * DAY)

        assert certificates.time_finding(seen).verdict is verdict

    def test_one_that_is_wrong_twice_says_so_twice(self) -> None:
        seen = replace(GOOD, wanted="student", now=400 * DAY)
        handshake = Handshake(
            is_wanted=True, reason="CERTIFICATE_EXPIRED", message="m", certificate=seen
        )

        tls, *both = certificates.handshake_findings(handshake)

        assert tls.verdict is Verdict.OK
        assert [(each.name, each.verdict) for each in both] == [
            ("certificate_name", Verdict.FAIL),
            ("certificate_time", Verdict.FAIL),
        ]

    @pytest.mark.parametrize("reason", cures.OF_TLS)
    def test_each_reason_fails_with_its_cure_where_no_certificate_was_seen(
        self, reason: str
    ) -> None:
        (found,) = certificates.handshake_findings(
            Handshake(is_wanted=True, reason=reason, message="m")
        )

        assert found.verdict is Verdict.FAIL
        assert found.cure == cures.OF_TLS[reason]

    def test_no_tls_on_either_side_is_said(self) -> None:
        (found,) = certificates.handshake_findings(Handshake(is_wanted=False))

        assert found.verdict is Verdict.OK
        assert "nothing on the way is encrypted" in found.message


def every_rule() -> set[str]:
    """The rules that the guide lists; a test of the packaging holds them against the code."""
    guide = Path(__file__).parents[2] / "docs" / "using.md"
    table = guide.read_text("utf-8").partition("\n| `rule` | what")[2].partition("\n\n")[0]
    firsts = (line.split("|")[1] for line in table.splitlines()[2:])
    return {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)}


def every_finding() -> set[str]:
    """The names of findings in the doctor's source."""
    folder = Path(cures.__file__).parent
    source = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    names = re.findall(r'(?:\bname=|_tried\(|_room\(|_failed\()"(\w+)"', source)
    return {*names, *(f"{start}*" for start in re.findall(r'name=f"(\w+)\{', source))}


def test_the_page_has_every_finding_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for cell in firsts for name in re.findall(r"`([\w*]+)`", cell)}

    assert told == every_finding()


def every_error(kind: type[TeacherLogitsError] = TeacherLogitsError) -> set[str]:
    return {kind.reason}.union(*(every_error(each) for each in kind.__subclasses__()))


class TestCures:
    def test_every_reason_of_a_refused_transport_has_one(self) -> None:
        assert set(cures.OF_REASON) == set(RefusalReason)

    def test_every_rule_of_a_handshake_has_one(self) -> None:
        assert set(cures.OF_RULE) == every_rule()

    def test_every_reason_of_tls_has_one(self) -> None:
        assert set(cures.OF_TLS) == set(re.findall(r"^ {4}([A-Z_]+) ", tls_findings.__doc__, re.M))

    def test_each_kind_of_error_named_is_one(self) -> None:
        assert set(cures._OF_ERROR) <= every_error()

    def test_a_refusal_has_those_of_all_its_rules_once(self) -> None:
        broken = ("top_k_too_large", "student_dp_indivisible", "teacher_dp_indivisible")
        error = SessionRefusedError([Violation(rule=each, message="m") for each in broken])

        said = cures.cure_of_error(error)

        assert "--top-k" in said
        assert said.count("batch grid") == 1

    def test_a_reason_is_one_only_as_a_word(self) -> None:
        error = NoCommonTransportError("cuda_ipc: OTHER_DEVICE: no GPU")

        assert cures.cure_of_error(error) == cures.OF_REASON[RefusalReason.OTHER_DEVICE]

    def test_a_token_of_another_role_is_told_of_the_role_and_not_of_users(self) -> None:
        error = NotAllowedError("for the role student", facts={"reason": "ROLE_LACKING"})

        assert "a token of the role" in cures.cure_of_error(error)
        assert "--allow-uid" not in cures.cure_of_error(error)

    def test_a_user_that_is_not_on_the_list_is_told_so_first_and_nothing_that_is_nothing(
        self,
    ) -> None:
        message = (
            "local: OTHER_PROCESS: no; cuda_ipc: NOT_OFFERED: no; shared_memory: BROKER_REFUSED: 7"
        )
        error = SessionRefusedError([Violation(rule="not_proven_local", message=message)])

        said = cures.cure_of_error(error)

        assert said.startswith(cures.OF_REASON[RefusalReason.BROKER_REFUSED])
        assert "nothing:" not in said

    def test_where_nothing_is_to_be_done_that_is_said(self) -> None:
        error = NoCommonTransportError("local: OTHER_PROCESS: no")

        assert cures.cure_of_error(error) == cures.OF_REASON[RefusalReason.OTHER_PROCESS]
