"""What all operations share: dtypes, products, checks of arguments, autograd helpers."""
