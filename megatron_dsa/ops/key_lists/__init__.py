"""Key lists of DeepSeek-V4: compressed keys of a query, then its window."""
