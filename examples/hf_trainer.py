"""`transformers.Trainer` with a served teacher: the same loop, another config and class.

    python hf_trainer.py unix:/tmp/own/teacher.sock      (own_engine.py starts one there)

The student is a small Llama of random weights, so that nothing is fetched; rows are of differing
lengths, and their first two tokens are a prompt that is not learnt. With lmbda=0.25 the student
continues a quarter of the batches itself, and the teacher scores what it said.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from teacher_logits.errors import TeacherLogitsError
from teacher_logits_client.trainers.transformers import TeacherServerConfig, TeacherServerTrainer

VOCABULARY, ROWS, STEPS = 256, 64, 24


def rows() -> list[dict[str, list[int]]]:
    """Return rows of token ids with their labels; -100 is not learnt."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 33, (ROWS,), generator=chance).tolist()
    ids = [torch.randint(0, 32, (n,), generator=chance).tolist() for n in lengths]
    return [{"input_ids": each, "labels": [-100, -100, *each[2:]]} for each in ids]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad on the right; the left would do as well."""
    ids, labels = ([torch.tensor(row[name]) for row in batch] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main(address: str) -> list[float]:
    """Train, and return the loss on held-out rows before and after, in nats a token."""
    torch.manual_seed(0)
    student = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        config = TeacherServerConfig(
            output_dir=folder,
            teacher_server=address,
            top_k=16,  # ids a position; what is outside them is one category more (add_tail)
            beta=0.5,  # 0 is forward KL, 1 reverse KL, as in TRL
            lmbda=0.25,
            max_new_tokens=16,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,  # a token weighs the same however a step is cut
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=8,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = TeacherServerTrainer(
            model=student,
            args=config,
            train_dataset=rows()[8:],
            eval_dataset=rows()[:8],
            data_collator=collate,
        )
        with trainer.teacher:  # one session for all three; without it, one for each
            before = trainer.evaluate()["eval_loss"]
            trainer.train()
            return [before, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python hf_trainer.py ADDRESS      such as unix:/tmp/own/teacher.sock")
    try:
        found = main(sys.argv[1])
    except TeacherLogitsError as error:  # nobody answers there, for one
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"held out: {found[0]:.3f} -> {found[1]:.3f} nats a token\n")
