"""Files that users see: written whole or not at all, and errors of the file system in a sentence."""
