"""Turn rows of files into samples in the order of training: reading, chat templates, mixtures, packing, cursors."""
