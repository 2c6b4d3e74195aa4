"""The data plane: payloads in the fields of a store of rows, for trainers that train out of one.

    fields            what the fields are called, and what a row has of each
    jagged            fields of padded rows to nested tensors, without their padding
    padded            and back, padded, with the mask of what is no padding
    teacher_fields    our payloads, batches and targets as such fields
    row_meta          which rows, their lengths and their plan; kept row by row
    row_store         what is asked of a store, and a step whose rows are cleared at its end
    write_back        what one writer may write, and what it says of it in numbers
    group_reads       one rank reads for a whole replica
    presharded        a rank's turn: read its rows, run, write back, answer scalars
    transfer_queue    such a store: TransferQueue, by ``teacher-logits[transfer-queue]``

Import the module that you need; only the last asks for another package. Nothing here speaks to
one of our servers. Where NeMo RL's codec falls back to a padded rectangle without a word, or a
store answers with fewer rows or fields than were asked for, this is an error with the numbers.
"""
