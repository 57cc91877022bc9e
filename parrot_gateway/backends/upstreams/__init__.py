"""One upstream server: requests, answers, retries, circuit breaker."""
