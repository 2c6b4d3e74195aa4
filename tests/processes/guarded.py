"""A server that asks who comes: TLS, client certificates, tokens, a list of users.

It is a real process, on a Unix socket in a folder that lets every user in, and on a TCP port.
"""

import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
import trustme

import teacher_logits_client as tl
from teacher_logits.views import ServerView
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.config import find_connection

TOKENS = {
    "alice": "alice-0123456789abcdef",
    "bob": "bob-0123456789abcdef",
    "pool": "pool-0123456789abcdef",
    "ops": "ops-0123456789abcdef",
}
ROLES = {"alice": "student", "bob": "student", "pool": "publisher", "ops": "operator"}
SECONDS = 20.0
_SAMPLE = re.compile(r"^teacher_logits_refusals_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Papers:
    """Certificates as files: of an authority, of its server, and of one of its clients."""

    authority: trustme.CA
    folder: Path

    @property
    def tls(self) -> tl.Tls:
        """What a client has that belongs here."""
        client = self.folder / "client.pem"
        return tl.Tls(ca=self.folder / "ca.pem", cert=client, key=self.folder / "client.key")

    def certify(self, *names: str, **given: object) -> None:
        """Issue the server's certificate anew, key first, as a tool that knows no better does."""
        issued = self.authority.issue_cert(*names, **given)  # type: ignore[arg-type]
        _write(issued, self.folder, "server")


def make_papers(folder: Path) -> Papers:
    """Make an authority up, with a server named localhost and one client."""
    folder.mkdir()
    papers = Papers(trustme.CA(), folder)
    papers.authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    papers.certify("localhost", "127.0.0.1")
    _write(papers.authority.issue_cert("client"), folder, "client")
    return papers


def _write(issued: trustme.LeafCert, folder: Path, name: str) -> None:
    (folder / f"{name}.key").touch(mode=0o600)
    issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    (folder / f"{name}.pem").write_bytes(chain)


@dataclass(frozen=True)
class Guarded:
    """The server, what belongs to it, and the numbers that it shows."""

    server: tl.testing.ServerProcess
    folder: Path
    papers: Papers
    strangers: Papers

    @property
    def unix(self) -> str:
        """Its Unix socket."""
        return self._addresses[0]

    @property
    def tcp(self) -> str:
        """Its port, by the name of its certificate."""
        return self._addresses[1].replace("127.0.0.1", "localhost")

    @property
    def _addresses(self) -> list[str]:
        addresses = self.server.readiness["addresses"]
        assert isinstance(addresses, list)
        return addresses

    def connect(self, who: str, *, over_tcp: bool = False) -> tl.Client:
        """Connect as somebody who belongs here."""
        if over_tcp:
            return tl.connect(self.tcp, tls=self.papers.tls, token=TOKENS[who], timeout=SECONDS)
        return tl.connect(self.unix, token=TOKENS[who], timeout=SECONDS)

    def view(self) -> ServerView:
        """What its operator sees."""
        ops = find_connection(self.unix, token=TOKENS["ops"])
        view = inspect_server(ops.address, credentials=ops.credentials, timeout=SECONDS)
        return replace(view, uptime=view.uptime * 0)

    def refusals(self) -> Mapping[tuple[str, str], int]:
        """What its metrics say of refusals, by surface and reason."""
        page = str(self.server.readiness["metrics"])
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=SECONDS) as answer:
            text = answer.read().decode()
        found = {}
        for labels, count in _SAMPLE.findall(text):
            named = dict(_LABEL.findall(labels))
            found[named["surface"], named["reason"]] = int(float(count))
        return found

    def wait_for_more(self, surface: str, reason: str, before: int) -> None:
        """Wait until more is counted: gRPC's client may have tried several times."""
        until = time.monotonic() + SECONDS
        while self.refusals().get((surface, reason), 0) <= before:
            assert time.monotonic() < until, self.refusals()
            time.sleep(0)

    def wait_for(self, holds: Callable[[ServerView], bool]) -> None:
        """Wait until this holds of what its operator sees."""
        until = time.monotonic() + SECONDS
        while not holds(view := self.view()):
            assert time.monotonic() < until, view
            time.sleep(0)

    @contextmanager
    def counts(self, surface: str, reason: str, *, times: int = 1) -> Iterator[None]:
        """The block is refused so many times for this, and for nothing else; nothing changes."""
        before, held = self.refusals(), _held(self.view())
        yield
        want = {**before, (surface, reason): before.get((surface, reason), 0) + times}
        assert self.refusals() == want
        assert _held(self.view()) == held


def _held(view: ServerView) -> tuple[object, ...]:
    sessions = [(each.session_id, each.state, each.lease_count) for each in view.sessions]
    leases = [(each.lease_id, each.quarantined) for each in view.leases]
    return view.epoch, sessions, leases, view.pool, view.steps, view.registered, view.teachers


def metric_of(view: ServerView, name: str, **labels: str) -> float:
    """What a server has counted under a name, with these labels at least."""
    return sum(
        each.value
        for each in view.metrics
        if each.name == name and labels.items() <= dict(each.labels).items()
    )


def write_tokens(path: Path, tokens: Mapping[str, str]) -> None:
    """Write a file of tokens, as one step, that nobody else can read."""
    lines = [f"{ROLES[name]} {token} {name}\n" for name, token in tokens.items()]
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text("".join(lines))
    new.rename(path)


@contextmanager
def guarded_server(allow_uid: int) -> Iterator[Guarded]:
    """Run the server. Its folder is not below pytest's, which other users cannot enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        papers, strangers = make_papers(folder / "ours"), make_papers(folder / "theirs")
        write_tokens(folder / "tokens", TOKENS)
        listen = [f"unix:{folder / 's'}", "127.0.0.1:0"]
        with tl.testing.serve(
            listen=listen,
            metrics="127.0.0.1:0",
            token_file=folder / "tokens",
            tls_cert=papers.folder / "server.pem",
            tls_key=papers.folder / "server.key",
            tls_client_ca=papers.folder / "ca.pem",
            pool_size="4MiB",
            slab_size="1MiB",
            allow_uid=allow_uid,
        ) as server:
            yield Guarded(server, folder, papers, strangers)


def shown(who: str, secret: str = "") -> tuple[tuple[str, str], ...]:
    """What a plain stub's call shows: a token, and a session's secret."""
    token = (("authorization", f"Bearer {TOKENS[who]}"),)
    return (*token, ("teacher-logits-session", secret)) if secret else token


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    """Return what a plain call that fails ends in."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code()
