"""What mends each refusal: of a transport by its reason, of a handshake by its rule or error.

Tests hold the tables against all the names that there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.transport import RefusalReason

if TYPE_CHECKING:
    from teacher_logits.errors import TeacherLogitsError

_ONE_PID_NAMESPACE = (
    "let both share a PID namespace: docker --pid=container:NAME, or shareProcessNamespace: true "
    "in one pod"
)
OF_REASON = {
    RefusalReason.NOT_OFFERED: "have the server offer it: teacher-logits serve --transports "
    "local,shared_memory,stream (--ray-address for ray_object, --device-pool-size or a publisher "
    "with device= for cuda_ipc)",
    RefusalReason.BROKER_UNREACHABLE: "run on the server's machine, and give both sides the "
    "folder of the broker's socket under one path (in containers: one volume mounted in both)",
    RefusalReason.BROKER_REFUSED: "run as the server's user or root, or start the server with "
    "--allow-uid and this user's uid",
    RefusalReason.PEER_UNPROVEN: "use Linux 6.5 or newer on the server's machine, or let both "
    "sides share one PID namespace",
    RefusalReason.PROOF_MISSING: "use the same release on both sides",
    RefusalReason.PROOF_WRONG: "connect to the server itself: something between it and this "
    "process answers in its place",
    RefusalReason.OTHER_PROCESS: "nothing: it is for a student in the writer's own process",
    RefusalReason.SLAB_NOT_MAPPABLE: "allow passing descriptors and mapping them (a sandbox or "
    "seccomp profile forbids it); see the findings about slabs above",
    RefusalReason.PLATFORM: "run on Linux, with a release that has this transport",
    RefusalReason.NO_DEVICE: "give this container the GPU and its driver (docker --gpus)",
    RefusalReason.OTHER_DEVICE: "let this process see the teacher's GPU: --gpus, "
    "CUDA_VISIBLE_DEVICES",
    RefusalReason.NO_PEER_ACCESS: "put both on one GPU, or on GPUs with NVLink",
    RefusalReason.OTHER_PID_NAMESPACE: _ONE_PID_NAMESPACE,
    RefusalReason.MIG: "give teacher and student whole GPUs",
    RefusalReason.DRIVER_FAILED: "see what the driver said, in the message",
    RefusalReason.DRIVER_SLOW: "look at the GPU: its driver does not answer",
    RefusalReason.DATA_DIFFERS: "report it: a fault of the driver or of the topology",
    RefusalReason.OWN_HANDLE: "nothing: shared memory is used within one process",
    RefusalReason.NO_RAY: "pip install 'teacher-logits[ray]' here",
    RefusalReason.NOT_IN_RAY: "open the session in a task or an actor of the cluster, or behind "
    "ray.init(address=...)",
    RefusalReason.OTHER_CLUSTER: "connect both to one Ray cluster",
    RefusalReason.HOLDER_GONE: "open the session again; it is being replaced",
}

_GRID = "change the batch grid of one side so that both cut the step's rows alike"
_MODEL_GRID = "give both sides the same nodes and GPUs a node, or ask for locality prefer"
_PUBLISHERS = "give all publishers of a teacher one profile, and each rank one process"
OF_RULE = {
    "not_positive": "give whole numbers of at least 1",
    "gbs_mismatch": "train with the teacher's global batch size",
    "student_dp_indivisible": _GRID,
    "teacher_dp_indivisible": _GRID,
    "student_mbs_indivisible": _GRID,
    "teacher_mbs_indivisible": _GRID,
    "rank_out_of_range": "number ranks from 0 to one less than the data-parallel size",
    "readers_exceed_group": "give readers_per_rank no more than the ranks of a model's group",
    "rank_taken": "end the process that reads this rank, or give this one its own rank or "
    "student_id",
    "student_grid_conflict": "give all sessions of one student_id the same grid",
    "topology_mismatch": _MODEL_GRID,
    "dp_mismatch": _MODEL_GRID,
    "group_mismatch": _MODEL_GRID,
    "group_exceeds_node": _MODEL_GRID,
    "group_not_node_aligned": _MODEL_GRID,
    "model_grid_missing": "give model_grid, or ask for locality prefer",
    "not_proven_local": "mend what refused shared memory (its reason is in the message), or ask "
    "for locality prefer",
    "tokenizer_mismatch": "use the teacher's tokenizer",
    "vocab_mismatch": "use a student of the teacher's vocabulary, or the policy truncate",
    "top_k_too_large": "ask for fewer entries, or serve with a larger --top-k",
    "temperature_unavailable": "ask for a temperature that the teacher has, or serve with it",
    "column_unavailable": "ask for columns that the teacher has, or serve with them",
    "selection_unavailable": "ask for the selection that the teacher publishes",
    "codec_unavailable": "name a codec that the server has, or none",
    "engine_mismatch": "drop the engine that was insisted on, or serve with it",
    "arithmetic_type_mismatch": "drop the type that was insisted on, or serve in it",
    "protocol_version": "use releases of one protocol version on both sides",
    "sharding_unavailable": "cut the teacher in a way that can be put together again",
    "batch_grid_missing": "give the publisher a batch grid",
    "teacher_grid_conflict": _PUBLISHERS,
    "shard_taken": _PUBLISHERS,
}

OF_TLS = {
    "TLS_EXPECTED": "connect with TLS: tls://HOST:PORT, and --tls-ca with who signed the server's "
    "certificate",
    "TLS_NOT_SPOKEN": "start the server with --tls-cert and --tls-key, or connect without TLS",
    "CERTIFICATE_EXPIRED": "have the server's certificate renewed (it is read again without a "
    "restart), or set this machine's clock",
    "CERTIFICATE_NAME": "connect by a name that is in the certificate, or give one with "
    "--tls-server-name",
    "CERTIFICATE_UNTRUSTED": "give --tls-ca the certificate of who signed the server's",
    "CLIENT_CERTIFICATE_REFUSED": "give --tls-cert and --tls-key, of a certificate that one of the "
    "server's --tls-client-ca has signed",
    "NOT_GRPC": "give the address that the server listens on: its ready line has it",
}
"""By the reasons of ``tls_findings``."""

_OF_ERROR = {
    "UNKNOWN_TEACHER": "start its publishers, or name one of its teachers with --teacher-id",
    "SERVER_UNREACHABLE": "start the server or mend the address; a socket's folder must be visible "
    "here",
    "NOT_AVAILABLE": "wait until the server has loaded its teacher (--timeout), or see its log",
    "DEADLINE_PASSED": "wait longer (--timeout); the message says for what",
    "DRAINING": "connect to the server that takes its place: this one is being stopped",
    "POOL_FULL": "see who holds room (teacher-logits inspect), or serve with a larger --pool-size",
    "REQUEST_INVALID": "give the address of a teacher-logits server, and use releases that "
    "understand each other",
    "NOT_ALLOWED": "show a token of the role that this takes (--token-file), or run as a user that "
    "the server lets in (--allow-uid)",
    "UNKNOWN_CALLER": "show a token that the server knows (--token-file)",
    "CONFIG": "change what the message names",
    "NO_COMMON_TRANSPORT": "let one of the wanted transports work: the message says what refused "
    "each",
    "ENGINE": "see the server's log: its teacher failed",
}
_OF_FINER_REASON = {
    "TOKEN_MISSING": "show a token that the server knows (--token-file)",
    "TOKEN_UNKNOWN": "show a token that the server's file has now (--token-file)",
    "ROLE_LACKING": "show a token of the role that the message names (--token-file)",
}
"""By what an error's facts say of its reason, where that calls for something of its own."""
_NO_CURE = frozenset({RefusalReason.OTHER_PROCESS, RefusalReason.OWN_HANDLE})
"""Nothing is to be done about these."""


def cure_of_error(error: TeacherLogitsError) -> str:
    """Return what an error calls for: each of its rules, else each reason it names, else its kind.

    A refusal for want of shared memory has the reason of each transport in its message. What was
    tried and refused goes before what was not on offer.
    """
    named = [each for each in OF_REASON if _names(error.message, each.value)]
    mendable = [each for each in named if each not in _NO_CURE] or named
    mendable.sort(key=lambda reason: reason is RefusalReason.NOT_OFFERED)
    reasons = [OF_REASON[each] for each in mendable]
    rules = [each.rule for each in getattr(error, "violations", ())]
    cures = [OF_RULE[rule] for rule in rules if rule in OF_RULE and not reasons] or reasons
    if cures:
        return "; ".join(dict.fromkeys(cures))
    finer = finer_reason(error)
    if finer in _OF_FINER_REASON:
        return _OF_FINER_REASON[finer]
    return _OF_ERROR.get(error.reason, "the message says which rule was broken and by which number")


def finer_reason(error: TeacherLogitsError) -> str:
    """Return what an error's facts say of its reason beyond its kind; empty where nothing."""
    return str(error.facts.get("reason", ""))


def _names(message: str, reason: str) -> bool:
    """Whether a message has a reason as a word of its own."""
    return reason in message.replace(":", " ").replace(",", " ").replace(";", " ").split()
