// Java: threads, a scheduled executor, the collector at work, a file channel, a TCP connection, a child process.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;

public class JavaProgram {
  static String nonce;

  static byte[] secret(long label) throws Exception {
    return MessageDigest.getInstance("SHA-256").digest((nonce + label).getBytes(StandardCharsets.UTF_8));
  }

  static void check(boolean right, String what) {
    if (!right) throw new IllegalStateException(what);
  }

  public static void main(String[] arguments) {
    try {
      program();
    } catch (Throwable error) {
      System.out.println("FATAL " + error);
      System.out.flush();
      Runtime.getRuntime().halt(70);
    }
  }

  static void program() throws Exception {
    byte[] drawn = new byte[8];
    new SecureRandom().nextBytes(drawn);
    nonce = HexFormat.of().formatHex(drawn);
    String stop = System.getenv().getOrDefault("STATE_STOP", "stop");
    Map<Long, byte[]> history = new HashMap<>();
    AtomicLong ticks = new AtomicLong();
    var scheduler = Executors.newScheduledThreadPool(1);
    scheduler.scheduleAtFixedRate(ticks::incrementAndGet, 10, 10, TimeUnit.MILLISECONDS);
    var pool = Executors.newFixedThreadPool(2);
    ServerSocket server = new ServerSocket(0, 5, InetAddress.getLoopbackAddress());
    Socket client = new Socket(server.getInetAddress(), server.getLocalPort());
    Socket accepted = server.accept();
    client.setSoTimeout(30000);
    accepted.setSoTimeout(30000);
    FileChannel file = FileChannel.open(Path.of("file"), StandardOpenOption.CREATE, StandardOpenOption.READ,
        StandardOpenOption.WRITE);
    Process cat = new ProcessBuilder("cat").start();
    var answers = new BufferedReader(new InputStreamReader(cat.getInputStream()));
    ThreadLocal<byte[]> own = new ThreadLocal<>();
    own.set(secret(-1));
    long steps = 0;
    System.out.println("ready " + nonce);
    System.out.flush();
    while (!Files.exists(Path.of(stop))) {
      steps++;
      final long step = steps;
      history.put(step, secret(step));
      byte[] garbage = new byte[1 << 20];
      garbage[(int) step % garbage.length] = 1;
      client.getOutputStream().write(secret(step));
      check(MessageDigest.isEqual(accepted.getInputStream().readNBytes(32), secret(step)), "the TCP connection");
      file.write(ByteBuffer.wrap(secret(step)), 0);
      ByteBuffer read = ByteBuffer.allocate(32);
      file.read(read, 0);
      check(MessageDigest.isEqual(read.array(), secret(step)), "the file");
      check(pool.submit(() -> step * 3).get(30, TimeUnit.SECONDS) == step * 3, "the pool");
      cat.getOutputStream().write((step + "\n").getBytes(StandardCharsets.UTF_8));
      cat.getOutputStream().flush();
      check(answers.readLine().equals(Long.toString(step)), "the child process");
      long old = 1 + step * 7 % history.size();
      check(MessageDigest.isEqual(history.get(old), secret(old)), "the history");
      check(MessageDigest.isEqual(own.get(), secret(-1)), "the thread's own");
      long before = ticks.get(), began = System.nanoTime();
      while (ticks.get() == before) {
        check(System.nanoTime() - began < 30_000_000_000L, "the scheduler stands still");
        Thread.sleep(5);
      }
    }
    System.out.println("pass " + nonce + " " + steps);
    System.out.flush();
    Runtime.getRuntime().halt(0);
  }
}
