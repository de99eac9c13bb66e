"""What ``lipdp doctor`` looks at: a machine before its first private run."""
