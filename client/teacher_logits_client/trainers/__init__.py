"""Trainers that people already use, with a teacher that is served.

    transformers    TeacherServerConfig and TeacherServerTrainer, for whoever has a `Trainer`
    trl             ServerDistillationConfig and ServerDistillationTrainer, on-policy as TRL's own
    nemo_rl, verl   batches in the tensor keys of those trainers, to targets and back

Import the module that you need: each asks for its own package alone, and the last two for none.
A package that is not here is a ``ConfigError`` that names the extra to install.
"""
