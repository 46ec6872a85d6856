"""Put attention specs into existing models."""
