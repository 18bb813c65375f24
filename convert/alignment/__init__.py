"""Make the hybrid behave like its teacher: closed-form fits, then the stages of MOHAWK."""
