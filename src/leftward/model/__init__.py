"""The Decoder and its parts. Torch only: nothing in here knows of files, text or training."""
