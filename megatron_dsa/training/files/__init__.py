"""Files that users see: written whole or not at all; errors in a sentence."""
