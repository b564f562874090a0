"""Convert the rows of data files to training samples: file formats, chat templates, dataset mixtures, packing,
cursors."""
