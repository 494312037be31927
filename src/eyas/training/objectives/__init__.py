"""What a head is trained to do, one file per kind; `base` says what an objective offers the trainer."""
