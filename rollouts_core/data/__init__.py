"""From rows of files to samples in the order of training: reading, chat templates, mixtures, packing, cursors."""
