"""`teacher-logits` on a kernel before Linux 6.5, which knows no SO_PEERPIDFD."""

import runpy

from teacher_logits_server.broker import peers

peers.SO_PEERPIDFD = 9999  # ENOPROTOOPT, as there
runpy.run_module("teacher_logits", run_name="__main__", alter_sys=True)
