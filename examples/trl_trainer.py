"""TRL's on-policy distillation with a served teacher, at any beta.

    python trl_trainer.py unix:/tmp/own/teacher.sock      (own_engine.py starts one there)

The student continues prompts, and the teacher says of every byte what it would have said. Nothing
is fetched: the student is a small Llama of random weights, and a token is a byte.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from teacher_logits.errors import TeacherLogitsError
from teacher_logits_client.trainers.trl import ServerDistillationConfig, ServerDistillationTrainer

PROMPTS = ["aab", "xyxy", "the the", "0 0 0 1"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 ids, one a byte; the last ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    end = alphabet[-1]
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token=end, pad_token=end, padding_side="left"
    )


def main(address: str) -> list[float]:
    """Train, and return the loss of each step in nats a token."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    student = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        config = ServerDistillationConfig(
            output_dir=folder,
            teacher_server=address,
            loss_top_k=16,
            beta=0.5,
            max_completion_length=12,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=12,
            learning_rate=2e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        trainer = ServerDistillationTrainer(
            model=student,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": each} for each in PROMPTS * 8]),
            processing_class=tokenizer,
        )
        trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python trl_trainer.py ADDRESS      such as unix:/tmp/own/teacher.sock")
    try:
        losses = main(sys.argv[1])
    except TeacherLogitsError as error:  # nobody answers there, for one
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token\n")
