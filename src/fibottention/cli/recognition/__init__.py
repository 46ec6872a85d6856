"""Commands about runs that classify images or videos."""
